// Takes blocks of the pool for gradients and gives them back.
#include "plan/grad_blocks.h"

#include <utility>

namespace zerocore {

GradBlocks::GradBlocks(const ReductionFacts& facts) : facts_(facts) {
  for (const ReducedUnit& unit : facts.units) {
    held_.emplace_back(unit.layout->regions().size());
  }
}

void GradBlocks::take(RegionKey key, GradBuffer place, GradSteps& steps) {
  if (std::exchange(held(key)[static_cast<size_t>(place)], true)) {
    return;
  }
  GradStep step = make_step(GradStepKind::Take, key);
  step.to = place;
  step.nbytes = facts_.nbytes_at(key, place);
  steps.run(step);
}

void GradBlocks::give_back(RegionKey key, GradBuffer place, GradBuffer copied, GradSteps& steps) {
  if (!std::exchange(held(key)[static_cast<size_t>(place)], false)) {
    return;
  }
  GradStep step = make_step(GradStepKind::GiveBack, key);
  step.from = place;
  step.nbytes = facts_.nbytes_at(key, place);
  if (facts_.offloads_grads() && place == copied) {
    step.last_use = StreamRole::DeviceToHost;
  }
  steps.run(step);
}

void GradBlocks::give_back_all(RegionKey key, GradBuffer copied, GradSteps& steps) {
  for (const GradBuffer place :
       {GradBuffer::Sums, GradBuffer::Scratch, GradBuffer::Wire, GradBuffer::Full}) {
    give_back(key, place, copied, steps);
  }
}

void GradBlocks::reset(RegionKey key, GradSteps& steps) {
  held(key).fill(true);
  give_back_all(key, GradBuffer::Kept, steps);
}

} // namespace zerocore
