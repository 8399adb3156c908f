// Memory for the gradients of one region, by place: some stays, some is taken from the pool.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "engine/unit/unit.h"
#include "plan/reduction.h"

namespace zerocore {

class GradientMemory {
 public:
  // Allocates nothing.
  GradientMemory(const Unit& unit, int region);

  // 1-D: all that the place holds, and this rank's part of it. Not to be touched before the place
  // has memory.
  const at::Tensor& whole(Memory place) const;
  const at::Tensor& own(Memory place) const;
  // 1-D: the `numel` elements of this rank's part that it sums itself, see Note [Sums in order].
  at::Tensor summed(Memory place, int64_t numel) const;
  // 1-D: the `parts` that a reduction leaves there for each element of this rank's part.
  const at::Tensor& received(Memory place, int64_t parts) const {
    const bool is_shared = place == cut_ && part_.defined();
    return parts > 1 || is_shared ? whole(place) : own(place);
  }
  // A contiguous leaf of the kept gradients, from the element `begin` of this rank's.
  at::Tensor view(int64_t begin, at::IntArrayRef sizes) const;

  // The same of the gradients of all ranks, which only those that are not sharded have.
  at::Tensor view_of_all(int64_t begin, at::IntArrayRef sizes) const {
    return home().view(region_, begin, sizes);
  }

  // The kept gradients have memory from here on, zeroed at first.
  void keep();
  bool is_kept() const {
    return home().attached();
  }
  // Bytes of memory that stays, where it is none of the host's mapping.
  int64_t kept_nbytes() const {
    return is_kept() && host_ == nullptr ? home().nbytes() : 0;
  }
  // The same memory; there is some on the device.
  at::Tensor bytes() const {
    return home().bytes();
  }
  // Carry out a Take and a GiveBack.
  void take(const GradStep& step, BucketPool& pool);
  void give_back(const GradStep& step, BucketPool& pool);

 private:
  Bucket& bucket(Memory place) {
    return *buckets_[place];
  }
  const Bucket& bucket(Memory place) const {
    return *buckets_[place];
  }
  const Bucket& home() const {
    return bucket(home_);
  }

  void cut_scratch(const Region& region);
  void cut_sums(const Region& region);

  const UnitContext& context_;
  const UnitMesh& mesh_;
  UnitId unit_;
  int region_;
  const HostStates* host_; // has the memory of what is kept; null for the device or memory apart
  Memory home_; // whose bucket holds the kept gradients: Full unless they are sharded
  int64_t home_begin_ = 0; // their first element in it
  ByMemory<std::optional<Bucket>> buckets_; // by place
  ByMemory<Slot> slots_; // by place
  Memory cut_ = Memory::Scratch;
  at::Tensor part_, across_; // of `cut_`, where it has both
};

} // namespace zerocore
