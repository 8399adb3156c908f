// The memory of one unit, as steps name it: persistent memory and blocks of the pool.
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
  // All arguments but the name must outlive the object. Allocates nothing.
  UnitMemory(
      UnitId unit,
      const std::string& name,
      const Layout& layout,
      const UnitContext& context);

  // Return the full parameters, and this rank's shards if they have memory of their own.
  Bucket& full() {
    return bucket(Memory::Full, 0);
  }
  std::optional<Bucket>& shards() {
    return blocks_[Memory::Shard].front().bucket;
  }

  // Return a region's tensor in `memory`, 1-D: all of it, or this rank's part. Take the memory
  // before you read it.
  const at::Tensor& whole(Memory memory, int region) const;
  const at::Tensor& own(Memory memory, int region) const;
  // Returns the result of a reduction, with `parts` values for each element of this rank.
  const at::Tensor& received(Memory memory, int region, int64_t parts) const {
    return parts > 1 ? whole(memory, region) : own(memory, region);
  }
  // Returns the `numel` elements that this rank sums itself, see Note [Sums in order].
  at::Tensor summed(Memory memory, int region, int64_t numel) const;
  // Returns the operands of a collective: parameters as bytes, gradients as elements.
  Operands operands(const Step& step) const;

  // Carry out a Take and a Free.
  void take(const Step& step);
  void free(const Step& step);

  // Returns the kept copy and the part of Full that it copies, see Note [Near ranks]. The first
  // call allocates the copy.
  Operands near_part(int region);
  void drop_near() {
    near_.clear();
  }
  bool has_near() const {
    return !near_.empty();
  }

  // Returns a contiguous leaf over a region's kept gradients, from this rank's element `begin` on.
  at::Tensor grad_view(int region, int64_t begin, at::IntArrayRef sizes) const;
  // Returns such a leaf; `begin` counts from the first element of the kept gradients.
  at::Tensor sums_view(int region, int64_t begin, at::IntArrayRef sizes) const {
    return bucket(home_, region).view(region, begin, sizes);
  }
  // Allocates the memory of a region's kept gradients, zeroed, if there is none.
  void keep_grad(int region);
  bool keeps_grad(int region) const {
    return bucket(home_, region).attached();
  }
  // Returns this rank's kept gradients of all regions that have memory for them.
  std::vector<at::Tensor> kept_grads() const;
  // Returns the memory of kept gradients, as bytes, outside of the host's mapping.
  std::vector<at::Tensor> grad_bytes() const;

 private:
  struct Block {
    std::optional<Bucket> bucket;
    std::optional<Slot> slot = std::nullopt; // the pool's memory, while the block is taken
  };
  // This rank's part of a block, and the result of the reduction over the replicas.
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
  // Returns the region's block; parameters have one block for all regions.
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
  const Memory home_; // the block of the kept gradients: Kept if they are sharded, else FullGrad
  ByMemory<std::vector<Block>> blocks_; // parameters have one block, gradients one a region
  Memory cut_ = Memory::Scratch;
  std::vector<Cut> cuts_; // by region: the parts of the block `cut_`
  std::vector<at::Tensor> near_; // by region: bytes kept for near ranks; empty until near_part()
};

} // namespace zerocore
