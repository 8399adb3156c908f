// Decides how the parameters of one unit are gathered and given back.
#include "plan/unsharding.h"

namespace zerocore {

Unsharding::Unsharding(const GatherFacts& facts, const Layout& layout)
    : facts_(facts),
      layout_(layout),
      copies_out_(layout.copies_out()),
      state_(facts.policy.shards_parameters() ? UnitState::Sharded : UnitState::Unsharded),
      has_full_(!facts.policy.shards_parameters()) {}

void Unsharding::begin(const std::vector<int>& regions, GatherSteps& steps) {
  wait(steps); // a rank that skipped the unit may not have waited for its last gather
  const bool in_use = has_full_ && facts_.policy.shards_parameters();
  if (in_use) {
    steps.run({.kind = GatherStepKind::Order});
  }
  if (copies_out_) {
    take(ParamMemory::Received, StreamRole::AllGather, steps);
  } else if (!has_full_) {
    take(ParamMemory::Full, StreamRole::AllGather, steps);
  }
  if (state_ == UnitState::Sharded) {
    steps.run({.nbytes = layout_.nbytes(), .op = TraceOp::Unshard});
  }
  state_ = UnitState::Unsharding;
  if (facts_.tiers.parameters == Tier::Disk) {
    steps.run({.kind = GatherStepKind::Read});
  }
  for (const int region : regions) {
    start(region, steps);
  }
  steps.run({.kind = GatherStepKind::Launch});
}

void Unsharding::start(int index, GatherSteps& steps) const {
  const Region& region = layout_.regions()[index];
  const ParamMemory to = copies_out_ ? ParamMemory::Received : ParamMemory::Full;
  const bool loads = facts_.tiers.has_host_parameters();
  if (loads) {
    steps.run({GatherStepKind::Load, index, ParamMemory::Own, to, region.shard_nbytes()});
  }
  if (layout_.num_shards() > 1) {
    const bool is_in_place = loads || !facts_.policy.shards_parameters();
    const ParamMemory from = is_in_place ? to : ParamMemory::Own;
    const int64_t nbytes = facts_.method.wire_nbytes(region.nbytes());
    steps.run({GatherStepKind::Start, index, from, to, nbytes, TraceOp::AllGather});
  }
}

void Unsharding::wait(GatherSteps& steps) {
  if (state_ != UnitState::Unsharding) {
    return;
  }
  steps.run({.kind = GatherStepKind::Wait});
  if (copies_out_) {
    if (!has_full_) {
      take(ParamMemory::Full, StreamRole::Compute, steps);
    }
    steps.run({.kind = GatherStepKind::CopyOut});
    steps.run(
        {.kind = GatherStepKind::GiveBack,
         .from = ParamMemory::Received,
         .nbytes = layout_.nbytes()});
  }
  steps.run({.kind = GatherStepKind::Show});
  state_ = UnitState::Unsharded;
}

void Unsharding::reshard(GatherSteps& steps) {
  wait(steps);
  state_ = UnitState::Sharded;
  has_full_ = false;
  steps.run(
      {.kind = GatherStepKind::GiveBack, .from = ParamMemory::Full, .nbytes = layout_.nbytes()});
  steps.run({.nbytes = layout_.nbytes(), .op = TraceOp::Reshard});
}

void Unsharding::take(ParamMemory memory, StreamRole user, GatherSteps& steps) {
  steps.run({.kind = GatherStepKind::Take, .to = memory, .nbytes = layout_.nbytes(), .user = user});
  has_full_ = has_full_ || memory == ParamMemory::Full;
}

} // namespace zerocore
