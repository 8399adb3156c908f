// A collective of the emulated group as it is put together: what moves, where each peer mirrors
// this rank, and how many bytes cross the link.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <vector>

#include "emulation/emulated_link.h"
#include "emulation/emulated_work.h"

namespace zerocore {

class MirroredCall {
 public:
  MirroredCall(
      const c10d::Backend& group,
      c10d::OpType op,
      Traffic traffic,
      bool async,
      int64_t nbytes = 0,
      std::vector<at::Tensor> outputs = {});

  // The values of all ranks under a reduction.
  Combination combination(const c10d::ReduceOp& op) const;
  // One move. Throws ValueError where the tensors do not match.
  void add(const at::Tensor& to, const at::Tensor& from, Combination how);
  // Every rank's slice of `full` is what `own` is; `own` may be this rank's.
  void gather(const at::Tensor& full, const at::Tensor& own);
  // `shard` is this rank's slice of the reduced `full`.
  void reduce(const at::Tensor& shard, const at::Tensor& full, const c10d::ReduceOp& op);

  Traffic traffic;
  int64_t nbytes;
  Transfer transfer; // its time follows from traffic and bytes

 private:
  // `full` has a slice for each rank.
  void check_slices(const char* what, const at::Tensor& full, const at::Tensor& slice) const;

  int rank_, size_;
};

} // namespace zerocore
