// Launches the collectives of reductions: those of a unit's regions over the same ranks as one.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/unit/unit.h"
#include "plan/grad_steps.h"
#include "runtime/collectives.h"

namespace zerocore {

class ReductionLaunches {
 public:
  // Starts the collective of a Start or a StartAcross, at once or with the unit's next ones.
  // `pending` gets it, and outlives that.
  void start(
      const Unit& unit,
      const GradStep& step,
      Collectives& collectives,
      const at::Tensor& to,
      const at::Tensor& from,
      PendingCollective& pending);
  // Starts those that wait for others.
  void start_joint();
  void forget() {
    *this = {};
  }

 private:
  Collectives* collectives_ = nullptr;
  TraceOp op_ = TraceOp::ReduceScatter;
  std::vector<CollectiveCall> calls_;
  std::vector<PendingCollective*> pending_; // by call
};

} // namespace zerocore
