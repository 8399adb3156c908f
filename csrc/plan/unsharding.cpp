#include "plan/unsharding.h"

#include <c10/util/Exception.h>

namespace zerocore {

void Unsharding::begin(const std::vector<int>& regions, bool again, Steps& steps) {
  wait(steps); // if this rank skipped the unit, its last gather may be pending
  if (has_full_ && mesh_.shards_parameters) { // unit in use: compute may read Full
    steps.run({.kind = StepKind::Order, .unit = unit_, .stream = StreamRole::AllGather});
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
  if (state_ == ShardedState::Sharded) {
    steps.run({.unit = unit_, .op = TraceOp::Unshard, .nbytes = layout_.nbytes()});
  }
  state_ = ShardedState::Unsharding;
  if (tiers_.parameters == Tier::Disk && !is_near_) {
    steps.run({.kind = StepKind::Ready, .unit = unit_, .to = Memory::Shard});
  }
  if (mesh_.shards_across && !is_near_) {
    start_across(regions, steps);
  }
  for (const int region : regions) {
    is_near_ ? start_near(region, steps) : start(region, steps);
  }
  is_whole_ = true;
}

// See Note [Sharded across]. On a device, the all-gather stream orders both all-gathers.
void Unsharding::start_across(const std::vector<int>& regions, Steps& steps) const {
  for (const int region : regions) {
    steps.run(
        {.kind = StepKind::Start,
         .unit = unit_,
         .region = region,
         .from = mesh_.shards_parameters ? Memory::Shard : Memory::Full,
         .op = TraceOp::AllGather,
         .axis = AxisName::Replicas,
         .nbytes = layout_.regions()[region].nbytes() / mesh_.state.size});
  }
  if (on_host_) {
    steps.run({.kind = StepKind::Wait, .unit = unit_});
  }
}

void Unsharding::start(int index, Steps& steps) const {
  const Region& region = layout_.regions()[index];
  const Memory to = receives_ ? Memory::Received : Memory::Full;
  Step step = {.kind = StepKind::Move, .unit = unit_, .region = index, .to = to};
  const bool loads = tiers_.has_host_parameters();
  if (loads) {
    Step load = step;
    load.op = TraceOp::ToDevice;
    load.nbytes = region.shard_nbytes();
    steps.run(load);
  }
  if (layout_.num_shards() == 1) {
    return;
  }
  if (region.is_encoded()) {
    step.how = How::Encode;
    steps.run(step);
  }
  step.kind = StepKind::Start;
  if (loads || region.is_encoded() || !mesh_.shards_parameters || mesh_.shards_across) {
    step.from = to;
  }
  step.op = TraceOp::AllGather;
  step.nbytes = received_.regions()[index].nbytes();
  steps.run(step);
}

// If a rank still uses the unit, it sends its part of Full.
void Unsharding::start_near(int region, Steps& steps) const {
  steps.run(
      {.kind = StepKind::Start,
       .unit = unit_,
       .region = region,
       .from = has_near_ ? Memory::Near : Memory::Full,
       .op = TraceOp::GatherNear,
       .axis = AxisName::Near,
       .nbytes = layout_.regions()[region].nbytes()});
}

void Unsharding::wait(Steps& steps) {
  if (state_ != ShardedState::Unsharding) {
    return;
  }
  steps.run({.kind = StepKind::Wait, .unit = unit_});
  if (layout_.num_shards() == 1) { // the copy from the host is no collective
    steps.run({.kind = StepKind::Order, .unit = unit_, .behind = StreamRole::AllGather});
  }
  if (receives_) {
    if (!has_full_) {
      take(Memory::Full, StreamRole::Compute, steps);
    }
    steps.run(
        {.kind = StepKind::Move, .unit = unit_, .from = Memory::Received, .how = How::CopyOut});
    free(Memory::Received, received_.nbytes(), steps);
  }
  steps.run({.kind = StepKind::Ready, .unit = unit_});
  state_ = ShardedState::Unsharded;
}

void Unsharding::reshard(Steps& steps) {
  wait(steps);
  TORCH_INTERNAL_ASSERT(
      has_full_ && mesh_.shards_parameters, "unit ", unit_, " has no block to free");
  if (mesh_.gathers_near() && keeps_near_ && is_whole_ && !has_near_) {
    steps.run(
        {.kind = StepKind::Move,
         .unit = unit_,
         .from = Memory::Full,
         .to = Memory::Near,
         .how = How::Keep});
    has_near_ = true;
  }
  state_ = ShardedState::Sharded;
  has_full_ = false;
  free(Memory::Full, layout_.nbytes(), steps);
  steps.run({.unit = unit_, .op = TraceOp::Reshard, .nbytes = layout_.nbytes()});
}

void Unsharding::take(Memory memory, StreamRole user, Steps& steps) {
  steps.run(
      {.kind = StepKind::Take,
       .unit = unit_,
       .to = memory,
       .nbytes = (memory == Memory::Received ? received_ : layout_).nbytes(),
       .stream = user});
  has_full_ = has_full_ || memory == Memory::Full;
}

void Unsharding::free(Memory memory, int64_t nbytes, Steps& steps) const {
  steps.run({.kind = StepKind::Free, .unit = unit_, .from = memory, .nbytes = nbytes});
}

} // namespace zerocore
