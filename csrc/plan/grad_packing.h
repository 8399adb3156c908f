// Decides where gradients are packed and whether they add, and takes blocks of the pool for them;
// integers only.
#pragma once

#include <optional>

#include "plan/grad_steps.h"
#include "plan/reduction_state.h"

namespace zerocore {

class GradPacking {
 public:
  // All outlive it.
  GradPacking(const ReductionFacts& facts, ReductionState& state) : facts_(facts), state_(state) {}

  // Takes the blocks that a unit's gradients are packed into, see Note [Gradients in place].
  void prepare(UnitId unit, GradSteps& steps);
  // Where layers may write gradients.
  std::optional<GradBuffer> place(RegionKey key) const;
  // Of a backward that did not come to the reduction.
  void give_back_unused(RegionKey key, GradSteps& steps);
  // `holds`: into sums of this rank.
  void pack(RegionKey key, bool holds, GradSteps& steps);
  // Does nothing for a block that is held.
  void take(RegionKey key, GradBuffer place, GradSteps& steps);
  // All blocks that are held. The host copies from `copied`.
  void give_back_all(RegionKey key, GradBuffer copied, GradSteps& steps);
  // Steps that were decided may not have been carried out: gives back whatever may be held.
  void reset(RegionKey key, GradSteps& steps);
  // See Reduction::added.
  Range added(const GradStep& pack, int param) const;

 private:
  GradBuffer target(RegionKey key, bool holds) const;
  bool packs_bare(RegionKey key, bool holds) const;
  void take_blocks(RegionKey key, bool holds, GradSteps& steps);

  const ReductionFacts& facts_;
  ReductionState& state_;
};

} // namespace zerocore
