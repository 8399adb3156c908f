// The states of a model in the host's memory.
#include "engine/unit/host_states.h"

#include "runtime/cuda_calls.h"

namespace zerocore {

void HostStates::plan(const Units& units, const UnitContext& context) {
  layout_.emplace(context.tiers, context.lands_gradients());
  for (const auto& unit : units) {
    layout_->add(unit->layout(), unit->context().mesh);
  }
  options_.nbytes = layout_->nbytes();
  options_.inherited = true; // a worker of a data loader may look at a parameter
  if (context.streams->device().is_cuda() && cuda_calls() != nullptr) {
    options_.pinned_nbytes = layout_->copied_nbytes();
  }
}

void HostStates::open() {
  memory_ = HostMemory::map(options_);
}

c10::DataPtr HostStates::at(const Range& range) const {
  TORCH_INTERNAL_ASSERT(memory_ != nullptr, "the host's memory was not mapped");
  return memory_->at(range.begin);
}

c10::DataPtr HostStates::memory(UnitId unit, Memory part) const {
  return at(layout_->part(unit, part));
}

c10::DataPtr HostStates::gradient(UnitId unit, int region) const {
  return at(layout_->gradient(unit, region));
}

} // namespace zerocore
