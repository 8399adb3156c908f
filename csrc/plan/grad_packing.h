// Decides where gradients are packed and whether they add, and takes blocks of the pool for them;
// integers only.
#pragma once

#include "plan/grad_steps.h"
#include "plan/reduction_state.h"

namespace zerocore {

class GradPacking {
 public:
  // All outlive it.
  GradPacking(const ReductionFacts& facts, ReductionState& state) : facts_(facts), state_(state) {}

  // `holds`: into sums of this rank.
  void pack(RegionKey key, bool holds, GradSteps& steps);
  // Does nothing for a block that is held.
  void take(RegionKey key, Memory place, GradSteps& steps);
  // All blocks that are held. The host copies from `copied`.
  void give_back_all(RegionKey key, Memory copied, GradSteps& steps);
  // Steps that were decided may not have been carried out: gives back whatever may be held.
  void reset(RegionKey key, GradSteps& steps);
  // See Reduction::added.
  Range added(const GradStep& pack, int param) const;

 private:
  Memory target(RegionKey key, bool holds) const;
  bool holds_bare(RegionKey key) const;

  const ReductionFacts& facts_;
  ReductionState& state_;
};

} // namespace zerocore
