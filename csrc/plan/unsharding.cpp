// Decides how the parameters of one unit are gathered and given back.
#include "plan/unsharding.h"

#include <c10/util/Exception.h>

namespace zerocore {

void Unsharding::begin(const std::vector<int>& regions, bool again, GatherSteps& steps) {
  wait(steps); // a rank that skipped the unit may not have waited for its last gather
  const bool in_use = has_full_ && mesh_.shards_parameters;
  if (in_use) {
    steps.run({.kind = GatherStepKind::Order, .unit = unit_});
  }
  is_near_ = again && mesh_.gathers_near() && (has_near_ || has_full_);
  has_near_ = has_near_ && is_near_;
  is_whole_ = false;
  receives_ = copies_out_ && !is_near_;
  if (receives_) {
    take(Memory::Received, StreamRole::AllGather, steps);
  } else if (!has_full_) {
    take(Memory::Full, StreamRole::AllGather, steps);
  }
  if (state_ == UnitState::Sharded) {
    steps.run({.unit = unit_, .nbytes = layout_.nbytes(), .op = TraceOp::Unshard});
  }
  state_ = UnitState::Unsharding;
  if (tiers_.parameters == Tier::Disk && !is_near_) {
    steps.run({.kind = GatherStepKind::Read, .unit = unit_});
  }
  if (mesh_.shards_across && !is_near_) {
    start_across(regions, steps);
  }
  for (const int region : regions) {
    is_near_ ? start_near(region, steps) : start(region, steps);
  }
  steps.run({.kind = GatherStepKind::Launch, .unit = unit_});
  is_whole_ = true;
}

// See Note [Sharded across].
void Unsharding::start_across(const std::vector<int>& regions, GatherSteps& steps) const {
  const Memory from = mesh_.shards_parameters ? Memory::Shard : Memory::Full;
  for (const int region : regions) {
    const int64_t nbytes = layout_.regions()[region].nbytes() / mesh_.state.size;
    steps.run(
        {GatherStepKind::StartAcross,
         unit_,
         region,
         from,
         Memory::Full,
         nbytes,
         TraceOp::AllGather});
  }
  steps.run({.kind = GatherStepKind::WaitAcross, .unit = unit_});
}

void Unsharding::start(int index, GatherSteps& steps) const {
  const Region& region = layout_.regions()[index];
  const Memory to = receives_ ? Memory::Received : Memory::Full;
  const bool loads = tiers_.has_host_parameters();
  if (loads) {
    steps.run({GatherStepKind::Load, unit_, index, Memory::Shard, to, region.shard_nbytes()});
  }
  if (layout_.num_shards() > 1) {
    const bool encodes = region.is_encoded();
    if (encodes) {
      steps.run({GatherStepKind::Encode, unit_, index, Memory::Shard, to});
    }
    const bool is_in_place = loads || encodes || !mesh_.shards_parameters || mesh_.shards_across;
    const Memory from = is_in_place ? to : Memory::Shard;
    const int64_t nbytes = received_.regions()[index].nbytes();
    steps.run({GatherStepKind::Start, unit_, index, from, to, nbytes, TraceOp::AllGather});
  }
}

// A rank that still uses the unit has its part of Full.
void Unsharding::start_near(int region, GatherSteps& steps) const {
  const Memory from = has_near_ ? Memory::Near : Memory::Full;
  const int64_t nbytes = layout_.regions()[region].nbytes();
  steps.run(
      {GatherStepKind::Start, unit_, region, from, Memory::Full, nbytes, TraceOp::GatherNear});
}

void Unsharding::wait(GatherSteps& steps) {
  if (state_ != UnitState::Unsharding) {
    return;
  }
  steps.run({.kind = GatherStepKind::Wait, .unit = unit_});
  if (receives_) {
    if (!has_full_) {
      take(Memory::Full, StreamRole::Compute, steps);
    }
    steps.run({.kind = GatherStepKind::CopyOut, .unit = unit_});
    steps.run(
        {.kind = GatherStepKind::GiveBack,
         .unit = unit_,
         .from = Memory::Received,
         .nbytes = received_.nbytes()});
  }
  steps.run({.kind = GatherStepKind::Show, .unit = unit_});
  state_ = UnitState::Unsharded;
}

void Unsharding::reshard(GatherSteps& steps) {
  wait(steps);
  TORCH_INTERNAL_ASSERT(
      has_full_ && mesh_.shards_parameters, "unit ", unit_, " has nothing to give back");
  if (mesh_.gathers_near() && keeps_near_ && is_whole_ && !has_near_) {
    steps.run({.kind = GatherStepKind::Keep, .unit = unit_});
    has_near_ = true;
  }
  state_ = UnitState::Sharded;
  has_full_ = false;
  steps.run(
      {.kind = GatherStepKind::GiveBack,
       .unit = unit_,
       .from = Memory::Full,
       .nbytes = layout_.nbytes()});
  steps.run({.unit = unit_, .nbytes = layout_.nbytes(), .op = TraceOp::Reshard});
}

void Unsharding::take(Memory memory, StreamRole user, GatherSteps& steps) {
  steps.run(
      {.kind = GatherStepKind::Take,
       .unit = unit_,
       .to = memory,
       .nbytes = (memory == Memory::Received ? received_ : layout_).nbytes(),
       .user = user});
  has_full_ = has_full_ || memory == Memory::Full;
}

} // namespace zerocore
