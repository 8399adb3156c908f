// The blocks of the pool that reductions of gradients hold.
#pragma once

#include <array>
#include <vector>

#include "plan/grad_steps.h"
#include "plan/reduction_facts.h"

namespace zerocore {

class GradBlocks {
 public:
  // The facts outlive it.
  explicit GradBlocks(const ReductionFacts& facts);

  // Does nothing for a block that is held.
  void take(RegionKey key, GradBuffer place, GradSteps& steps);
  // Does nothing for a block that is not. The host copies from `copied`.
  void give_back(RegionKey key, GradBuffer place, GradBuffer copied, GradSteps& steps);
  void give_back_all(RegionKey key, GradBuffer copied, GradSteps& steps);
  // Steps that were decided may not have been carried out: gives back whatever may be held.
  void reset(RegionKey key, GradSteps& steps);

 private:
  using Held = std::array<bool, kNumGradBuffers>; // by place

  Held& held(RegionKey key) {
    return held_[key.first][key.second];
  }

  const ReductionFacts& facts_;
  std::vector<std::vector<Held>> held_; // by unit and region
};

} // namespace zerocore
