// Decides how the parameters of one unit are gathered and given back.
#include "plan/unsharding.h"

#include <c10/util/Exception.h>

namespace zerocore {

Unsharding::Unsharding(UnitId unit, const GatherFacts& facts, const Layout& layout)
    : unit_(unit),
      facts_(facts),
      layout_(layout),
      copies_out_(layout.copies_out()),
      state_(facts.policy.shards_parameters() ? UnitState::Sharded : UnitState::Unsharded),
      has_full_(!facts.policy.shards_parameters()) {}

void Unsharding::begin(const std::vector<int>& regions, GatherSteps& steps) {
  wait(steps); // a rank that skipped the unit may not have waited for its last gather
  const bool in_use = has_full_ && facts_.policy.shards_parameters();
  if (in_use) {
    steps.run({.kind = GatherStepKind::Order, .unit = unit_});
  }
  if (copies_out_) {
    take(ParamMemory::Received, StreamRole::AllGather, steps);
  } else if (!has_full_) {
    take(ParamMemory::Full, StreamRole::AllGather, steps);
  }
  if (state_ == UnitState::Sharded) {
    steps.run({.unit = unit_, .nbytes = layout_.nbytes(), .op = TraceOp::Unshard});
  }
  state_ = UnitState::Unsharding;
  if (facts_.tiers.parameters == Tier::Disk) {
    steps.run({.kind = GatherStepKind::Read, .unit = unit_});
  }
  for (const int region : regions) {
    start(region, steps);
  }
  steps.run({.kind = GatherStepKind::Launch, .unit = unit_});
}

void Unsharding::start(int index, GatherSteps& steps) const {
  const Region& region = layout_.regions()[index];
  const ParamMemory to = copies_out_ ? ParamMemory::Received : ParamMemory::Full;
  const bool loads = facts_.tiers.has_host_parameters();
  if (loads) {
    steps.run({GatherStepKind::Load, unit_, index, ParamMemory::Own, to, region.shard_nbytes()});
  }
  if (layout_.num_shards() > 1) {
    const bool is_in_place = loads || !facts_.policy.shards_parameters();
    const ParamMemory from = is_in_place ? to : ParamMemory::Own;
    const int64_t nbytes = facts_.method.wire_nbytes(region.nbytes());
    steps.run({GatherStepKind::Start, unit_, index, from, to, nbytes, TraceOp::AllGather});
  }
}

void Unsharding::wait(GatherSteps& steps) {
  if (state_ != UnitState::Unsharding) {
    return;
  }
  steps.run({.kind = GatherStepKind::Wait, .unit = unit_});
  if (copies_out_) {
    if (!has_full_) {
      take(ParamMemory::Full, StreamRole::Compute, steps);
    }
    steps.run({.kind = GatherStepKind::CopyOut, .unit = unit_});
    steps.run(
        {.kind = GatherStepKind::GiveBack,
         .unit = unit_,
         .from = ParamMemory::Received,
         .nbytes = layout_.nbytes()});
  }
  steps.run({.kind = GatherStepKind::Show, .unit = unit_});
  state_ = UnitState::Unsharded;
}

void Unsharding::reshard(GatherSteps& steps) {
  wait(steps);
  TORCH_INTERNAL_ASSERT(
      has_full_ && facts_.policy.shards_parameters(), "unit ", unit_, " has nothing to give back");
  state_ = UnitState::Sharded;
  has_full_ = false;
  steps.run(
      {.kind = GatherStepKind::GiveBack,
       .unit = unit_,
       .from = ParamMemory::Full,
       .nbytes = layout_.nbytes()});
  steps.run({.unit = unit_, .nbytes = layout_.nbytes(), .op = TraceOp::Reshard});
}

void Unsharding::take(ParamMemory memory, StreamRole user, GatherSteps& steps) {
  steps.run(
      {.kind = GatherStepKind::Take,
       .unit = unit_,
       .to = memory,
       .nbytes = layout_.nbytes(),
       .user = user});
  has_full_ = has_full_ || memory == ParamMemory::Full;
}

} // namespace zerocore
