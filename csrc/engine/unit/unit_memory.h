// The memory of one unit, as steps name it: some stays, some is taken from the pool.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "engine/unit/unit_context.h"
#include "memory/bucket.h"
#include "plan/steps.h"

namespace zerocore {

// The tensors that a collective writes and reads.
struct Operands {
  at::Tensor to, from;
};

class UnitMemory {
 public:
  // All but the name outlive it. Allocates nothing.
  UnitMemory(
      UnitId unit,
      const std::string& name,
      const Layout& layout,
      const UnitContext& context);

  // Parameters as layers compute with them, and this rank's where they have memory of their own.
  Bucket& full() {
    return bucket(Memory::Full, 0);
  }
  std::optional<Bucket>& shards() {
    return blocks_[Memory::Shard].front().bucket;
  }

  // Of a region, 1-D: all that the memory holds, and this rank's part of it. Not to be touched
  // before the memory is there.
  const at::Tensor& whole(Memory memory, int region) const;
  const at::Tensor& own(Memory memory, int region) const;
  // The `parts` that a reduction leaves there for each element of this rank's part.
  const at::Tensor& received(Memory memory, int region, int64_t parts) const {
    return parts > 1 ? whole(memory, region) : own(memory, region);
  }
  // The `numel` elements of this rank's part that it sums itself, see Note [Sums in order].
  at::Tensor summed(Memory memory, int region, int64_t numel) const;
  // Bytes of parameters, which gathers only move; elements of gradients.
  Operands operands(const Step& step) const;

  // Carry out a Take and a Free.
  void take(const Step& step);
  void free(const Step& step);

  // Of Full, see Note [Near ranks]: what is kept, with new memory at first, and where it comes
  // from.
  Operands near_part(int region);
  void drop_near() {
    near_.clear();
  }
  bool has_near() const {
    return !near_.empty();
  }

  // A contiguous leaf of a region's kept gradients, from the element `begin` of this rank's.
  at::Tensor grad_view(int region, int64_t begin, at::IntArrayRef sizes) const;
  // The same of the gradients of all ranks, which only those that are not sharded have.
  at::Tensor sums_view(int region, int64_t begin, at::IntArrayRef sizes) const {
    return bucket(home_, region).view(region, begin, sizes);
  }
  // The kept gradients have memory from here on, zeroed at first.
  void keep_grad(int region);
  bool keeps_grad(int region) const {
    return bucket(home_, region).attached();
  }
  // This rank's kept gradients, by region those that have memory.
  std::vector<at::Tensor> kept_grads() const;
  // The memory of kept gradients, as bytes; without that of the host's mapping.
  std::vector<at::Tensor> grad_bytes() const;

 private:
  struct Block {
    std::optional<Bucket> bucket;
    std::optional<Slot> slot = std::nullopt; // while it is taken
  };
  // A part of a block, and what the reduction over the replicas leaves beside or in it.
  struct Cut {
    at::Tensor part, across;
  };

  Bucket& bucket(Memory memory, int region) {
    return *block(memory, region).bucket;
  }
  const Bucket& bucket(Memory memory, int region) const {
    const std::vector<Block>& blocks = blocks_[memory];
    return *blocks[blocks.size() == 1 ? 0 : region].bucket;
  }
  // Parameters have one for all regions.
  Block& block(Memory memory, int region) {
    std::vector<Block>& blocks = blocks_[memory];
    return blocks[blocks.size() == 1 ? 0 : region];
  }
  void add_gradients(int region, const std::string& owner);
  void cut_scratch(int region);
  void cut_sums(int region);
  const HostStates* host_of(int region) const;
  const at::Tensor& bytes(Memory memory, int region) const;

  UnitId unit_;
  const Layout& layout_;
  const UnitContext& context_;
  const UnitMesh& mesh_;
  const Memory home_; // whose block holds the kept gradients: FullGrad unless they are sharded
  ByMemory<std::vector<Block>> blocks_; // of gradients by region
  Memory cut_ = Memory::Scratch;
  std::vector<Cut> cuts_; // of `cut_`, by region
  std::vector<at::Tensor> near_; // bytes by region; empty before the first
};

} // namespace zerocore
