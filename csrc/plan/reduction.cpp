// Where gradients are packed, whether they add, when they are reduced.
#include "plan/reduction.h"

namespace zerocore {

namespace {

// Sums the parts that have come, with what `last` says of the last sum, see Note [Sums in order].
// Returns whether a last gather has to be waited for.
bool sum_in_order(const ReductionFacts& facts, GradStep last, GradSteps& steps) {
  const RegionKey key{last.unit, last.region};
  const UnitMesh& mesh = facts.mesh_of(last.unit);
  const auto start = [&](TraceOp op, AxisName axis, Memory from, Memory to) {
    GradStep step = make_step(GradStepKind::StartAcross, key, from, to);
    step.op = op;
    step.axis = axis;
    step.nbytes =
        facts.nbytes_at(key, Memory::FullGrad) / (axis == AxisName::State ? 1 : mesh.state.size);
    steps.run(make_step(GradStepKind::Order, key));
    steps.run(step);
  };
  last.from = Memory::Scratch;
  last.parts = mesh.parts();
  if (mesh.sums_across()) { // each replica gets its part of the sums of all
    GradStep first = make_step(GradStepKind::Sum, key, Memory::Scratch, Memory::Sums);
    first.parts = mesh.parts();
    steps.run(first);
    start(TraceOp::ReduceScatter, AxisName::Replicas, Memory::Sums, Memory::Across);
    steps.run(make_step(GradStepKind::WaitAcross, key));
    last.from = Memory::Across;
    last.parts = mesh.replicas.size;
  }
  steps.run(last);
  const bool gathers_across = mesh.sums_across() && !mesh.shards_across;
  if (gathers_across) {
    start(TraceOp::GatherSums, AxisName::Replicas, last.to, last.to);
  }
  if (gathers_across && !mesh.shards_optimizer) {
    steps.run(make_step(GradStepKind::WaitAcross, key));
  }
  if (!mesh.shards_optimizer) {
    start(TraceOp::GatherSums, AxisName::State, last.to, last.to);
  }
  return gathers_across || !mesh.shards_optimizer;
}

} // namespace

Reduction::Reduction(const ReductionOptions& options, std::vector<ReducedUnit> units)
    : facts_(options, std::move(units)), state_(facts_), packing_(facts_, state_) {}

bool Reduction::reduce(UnitId unit, bool sync, GradSteps& steps) {
  const bool holds = this->holds(unit, sync);
  complete_until(most_beside(unit), steps);
  const std::vector<Key> keys = state_.trained_regions(unit);
  for (const Key& key : keys) {
    wait_across(key, steps);
    packing_.pack(key, holds, steps);
  }
  if (!holds && facts_.mesh_of(unit).communicates()) {
    steps.run(make_step(GradStepKind::Order, {unit, 0}));
    for (const Key& key : keys) {
      issue(key, steps);
    }
    if (!keys.empty()) {
      in_flight_.push_back(keys);
    }
    if (facts_.runs_across(unit)) { // behind all of the unit's reductions, which may be one launch
      for (const Key& key : keys) {
        start_across(key, state_.of(key).result, steps);
      }
    }
  } else if (!holds) {
    if (facts_.offloads_grads()) {
      for (const Key& key : keys) {
        offload_grad(key, Memory::FullGrad, steps);
        packing_.give_back_all(key, Memory::FullGrad, steps);
      }
    }
    for (ParamState& param : state_.params(unit)) {
      param = {/*valid=*/param.valid || param.local, /*local=*/false};
    }
    for (const Key& key : keys) {
      grad_ready(key, steps);
    }
  }
  return !holds;
}

// Units that may be in flight beside this one: few where they hold blocks of the pool, which the
// next ones then take, and where the sums over the replicas wait for the host.
size_t Reduction::most_beside(UnitId unit) const {
  if (is_in_flight(unit)) {
    return 0; // a second reduction in one backward
  }
  const UnitMesh& mesh = facts_.mesh_of(unit);
  const bool is_limited = mesh.shards_gradients || facts_.takes_scratch(unit) ||
      facts_.hands_across(unit) ||
      (mesh.communicates() &&
       std::ranges::any_of(facts_.layout_of(unit).regions(), &Region::has_wire));
  return is_limited ? facts_.options.sharding.reductions - 1 : in_flight_.size();
}

bool Reduction::is_in_flight(UnitId unit) const {
  return std::ranges::any_of(
      in_flight_, [&](const std::vector<Key>& keys) { return keys[0].first == unit; });
}

void Reduction::finish(GradSteps& steps) {
  complete_until(0, steps);
  for (const Key& key : state_.regions()) {
    if (state_.of(key).across) {
      wait_across(key, steps);
      grad_ready(key, steps);
    }
  }
}

// Steps that were decided may not have been carried out, so all blocks are given back.
void Reduction::reset(GradSteps& steps) {
  in_flight_.clear();
  for (const Key& key : state_.regions()) {
    RegionState& state = state_.of(key);
    state.local = false;
    state.across = false;
    state.result = Memory::Kept; // whoever resets has waited for copies to the host
    steps.run(make_step(GradStepKind::Wait, key));
    steps.run(make_step(GradStepKind::WaitAcross, key));
    packing_.reset(key, steps);
    for (const int param : facts_.region_of(key).params) {
      state_.params(key.first)[param].local = false;
    }
  }
}

// -- reducing -------------------------------------------------------------------------------

void Reduction::issue(Key key, GradSteps& steps) {
  const UnitMesh& mesh = facts_.mesh_of(key.first);
  const bool scatters = mesh.shards_optimizer || mesh.sums_in_order;
  choose_result(key, steps);
  const Memory from = facts_.is_wired(key) ? Memory::Wire : Memory::FullGrad;
  GradStep step = make_step(GradStepKind::Start, key, from, state_.of(key).result);
  step.op = scatters ? TraceOp::ReduceScatter : TraceOp::AllReduce;
  step.parts = mesh.parts();
  step.nbytes = facts_.nbytes_at(key, step.from);
  steps.run(step);
}

// Where the collective leaves its result: in the gradient itself if it can.
void Reduction::choose_result(Key key, GradSteps& steps) {
  RegionState& state = state_.of(key);
  const bool wired = facts_.is_wired(key);
  const bool sharded = facts_.mesh_of(key.first).shards_optimizer;
  state.result = wired ? Memory::Wire : facts_.offloads_grads() ? Memory::FullGrad : Memory::Kept;
  if (facts_.takes_scratch(key.first) ||
      (sharded && !wired && (state.adds || facts_.offloads_grads()))) {
    packing_.take(key, Memory::Scratch, steps);
    state.result = Memory::Scratch;
  }
}

void Reduction::complete_until(size_t most, GradSteps& steps) {
  std::vector<Key> oldest;
  for (; in_flight_.size() > most; in_flight_.pop_front()) {
    oldest.insert(oldest.end(), in_flight_.front().begin(), in_flight_.front().end());
  }
  if (!facts_.options.on_host && oldest.size() > 1) {
    // The last one first: on a stream it is behind the others, so one wait is enough.
    wait(oldest.back(), steps);
  }
  for (const Key& key : oldest) {
    complete(key, steps);
  }
}

// Where the sum over the replicas runs right behind the reduction, it is what is waited for.
void Reduction::wait(Key key, GradSteps& steps) {
  steps.run(make_step(
      facts_.runs_across(key.first) ? GradStepKind::WaitAcross : GradStepKind::Wait, key));
}

// Waits for a reduction and adds its result to the gradient that is kept.
void Reduction::complete(Key key, GradSteps& steps) {
  RegionState& state = state_.of(key);
  wait(key, steps);
  if (facts_.mesh_of(key.first).sums_in_order) {
    complete_in_order(key, steps);
  } else if (facts_.hands_across(key.first)) {
    complete_across(key, steps);
  } else if (facts_.offloads_grads()) {
    if (facts_.mesh_of(key.first).parts() > 1) {
      sum_parts(key, Memory::Scratch, ScalePart::None, steps);
    }
    offload_grad(key, state.result, steps);
  } else if (state.result != Memory::Kept) {
    add_to_kept(key, state.result, facts_.mesh_of(key.first).parts(), steps);
  }
  packing_.give_back_all(key, state.result, steps);
  for (const int param : facts_.region_of(key).params) {
    state_.params(key.first)[param] = {/*valid=*/true, /*local=*/false};
  }
  if (!state.across) {
    grad_ready(key, steps);
  }
}

// See Note [Sums in order].
void Reduction::complete_in_order(Key key, GradSteps& steps) {
  const bool offloads = facts_.offloads_grads();
  if (offloads || facts_.mesh_of(key.first).sums_across()) {
    packing_.take(key, Memory::Sums, steps);
  }
  if (!offloads) {
    zero_invalid(key, steps);
  }
  GradStep last = make_step(GradStepKind::Sum, key);
  last.to = offloads ? Memory::Sums : Memory::Kept;
  last.adds = state_.of(key).adds && !offloads;
  last.scale = rest_of_scale(key);
  state_.of(key).across = sum_in_order(facts_, last, steps);
  if (offloads) {
    wait_across(key, steps);
    offload_grad(key, Memory::Sums, steps);
  }
}

void Reduction::grad_ready(Key key, GradSteps& steps) {
  if (facts_.options.sharding.tiers.has_host_states()) {
    steps.run(make_step(GradStepKind::GradReady, key));
  }
}

// See Note [Replicas].
void Reduction::complete_across(Key key, GradSteps& steps) {
  const RegionState& state = state_.of(key);
  const bool in_place =
      !state.adds && !facts_.is_wired(key) && !facts_.mesh_of(key.first).shards_across;
  const Memory sum = in_place ? Memory::Kept : state.result;
  if (facts_.mesh_of(key.first).parts() > 1) {
    sum_parts(key, sum, in_place ? rest_of_scale(key) : ScalePart::None, steps);
  }
  start_across(key, sum, steps);
  if (!in_place) {
    wait_across(key, steps);
    add_to_kept(key, sum, 1, steps);
  }
}

// Of what an exchange has left.
void Reduction::sum_parts(Key key, Memory to, ScalePart scale, GradSteps& steps) {
  GradStep step = make_step(GradStepKind::Sum, key, Memory::Scratch, to);
  step.scale = scale;
  step.parts = facts_.mesh_of(key.first).parts();
  steps.run(step);
}

void Reduction::start_across(Key key, Memory place, GradSteps& steps) {
  const Memory to = facts_.last_result(key.first, place);
  GradStep step = make_step(GradStepKind::StartAcross, key, place, to);
  step.op = facts_.mesh_of(key.first).shards_across ? TraceOp::ReduceScatter : TraceOp::AllReduce;
  step.nbytes = facts_.result_nbytes(key);
  state_.of(key).across = facts_.options.on_host;
  steps.run(step);
}

void Reduction::wait_across(Key key, GradSteps& steps) {
  if (std::exchange(state_.of(key).across, false)) {
    steps.run(make_step(GradStepKind::WaitAcross, key));
  }
}

// A gradient that is added to holds no old value.
void Reduction::zero_invalid(Key key, GradSteps& steps) {
  for (const int param : facts_.region_of(key).params) {
    if (state_.of(key).adds && !is_valid(key.first, param)) {
      GradStep step = make_step(GradStepKind::Zero, key);
      step.param = param;
      steps.run(step);
    }
  }
}

void Reduction::offload_grad(Key key, Memory from, GradSteps& steps) {
  zero_invalid(key, steps);
  const Region& region = facts_.region_of(key);
  state_.of(key).result = from;
  GradStep step = make_step(GradStepKind::OffloadGrad, key, from);
  step.adds = state_.of(key).adds;
  const bool is_kept_type = from == Memory::FullGrad || from == Memory::Sums;
  const ElementType& type = is_kept_type ? region.grad : region.reduce;
  step.nbytes = type.itemsize * region.shard_numel;
  steps.run(step);
}

void Reduction::add_to_kept(Key key, Memory from, int64_t parts, GradSteps& steps) {
  zero_invalid(key, steps);
  GradStep step = make_step(GradStepKind::Sum, key, facts_.last_result(key.first, from));
  const UnitMesh& mesh = facts_.mesh_of(key.first);
  step.parts = mesh.shards_across ? mesh.replicas.parts() : parts;
  step.adds = state_.of(key).adds;
  step.scale = rest_of_scale(key);
  steps.run(step);
}

ScalePart Reduction::rest_of_scale(Key key) const {
  return facts_.splits_scale(key) ? ScalePart::Rest : ScalePart::None;
}

int64_t Reduction::kept_nbytes(UnitId unit) const {
  int64_t nbytes = 0;
  for (const Key& key : state_.regions(unit)) {
    nbytes += state_.of(key).kept ? facts_.nbytes_at(key, Memory::Kept) : 0;
  }
  return nbytes;
}

} // namespace zerocore
