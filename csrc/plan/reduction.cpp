#include "plan/reduction.h"

#include <array>
#include <utility>

#include "common/math.h"

namespace zerocore {

namespace {

// The blocks of the pool that a reduction takes, in the order in which it frees them.
constexpr std::array kBlocks = {Memory::Sums, Memory::Scratch, Memory::Wire, Memory::FullGrad};

Step make_step(StepKind kind, RegionKey key, Memory from = Memory::Kept, Memory to = Memory::Kept) {
  return {.kind = kind, .unit = key.first, .region = key.second, .from = from, .to = to};
}

Step make_move(How how, RegionKey key, Memory from = Memory::Kept, Memory to = Memory::Kept) {
  Step step = make_step(StepKind::Move, key, from, to);
  step.how = how;
  return step;
}

// Makes later collectives wait for the gradients packed so far.
void order(RegionKey key, Steps& steps) {
  Step step = make_step(StepKind::Order, key);
  step.stream = StreamRole::ReduceScatter;
  steps.run(step);
}

// Sums the received parts, see Note [Sums in order]. `last` has the target and the scale of the
// last sum. Returns whether the caller must wait for an all-gather of the sums.
bool sum_in_order(const ReductionFacts& facts, Step last, Steps& steps) {
  const RegionKey key{last.unit, last.region};
  const UnitMesh& mesh = facts.mesh_of(last.unit);
  const auto start = [&](TraceOp op, AxisName axis, Memory from, Memory to) {
    Step step = make_step(StepKind::Start, key, from, to);
    step.op = op;
    step.axis = axis;
    step.nbytes =
        facts.nbytes_at(key, Memory::FullGrad) / (axis == AxisName::State ? 1 : mesh.state.size);
    order(key, steps);
    steps.run(step);
  };
  last.from = Memory::Scratch;
  last.parts = mesh.parts();
  if (mesh.sums_across()) { // each replica receives its part of all replicas' sums
    Step first = make_move(How::Sum, key, Memory::Scratch, Memory::Sums);
    first.parts = mesh.parts();
    steps.run(first);
    start(TraceOp::ReduceScatter, AxisName::Replicas, Memory::Sums, Memory::Across);
    steps.run(make_step(StepKind::Wait, key));
    last.from = Memory::Across;
    last.parts = mesh.replicas.size;
  }
  steps.run(last);
  const bool gathers_across = mesh.sums_across() && !mesh.shards_across;
  if (gathers_across) {
    start(TraceOp::GatherSums, AxisName::Replicas, last.to, last.to);
  }
  if (gathers_across && !mesh.shards_optimizer) {
    steps.run(make_step(StepKind::Wait, key));
  }
  if (!mesh.shards_optimizer) {
    start(TraceOp::GatherSums, AxisName::State, last.to, last.to);
  }
  return gathers_across || !mesh.shards_optimizer;
}

} // namespace

Reduction::Reduction(const ReductionOptions& options, std::vector<ReducedUnit> units)
    : facts_(options, std::move(units)), state_(facts_), final_(facts_.units.size()) {}

bool Reduction::reduce(UnitId unit, bool sync, Steps& steps, bool averages) {
  const bool holds = this->holds(unit, sync);
  final_[unit] = sync;
  complete_until(most_beside(unit), steps);
  const std::vector<Key> keys = state_.trained_regions(unit);
  for (const Key& key : keys) {
    wait_across(key, steps);
    pack(key, holds, averages, steps);
  }
  if (!holds && facts_.mesh_of(unit).communicates()) {
    order({unit, 0}, steps);
    for (const Key& key : keys) {
      issue(key, steps);
    }
    if (!keys.empty()) {
      in_flight_.push_back(keys);
    }
    if (facts_.runs_sums_across(unit)) { // after the unit's reductions, which may be one launch
      for (const Key& key : keys) {
        start_across(key, state_.of(key).result, steps);
      }
    }
  } else if (!holds) {
    if (facts_.offloads_grads()) {
      for (const Key& key : keys) {
        offload_grad(key, Memory::FullGrad, steps);
        free_all(key, Memory::FullGrad, steps);
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

// Returns how many other units may still be reducing. The number is limited if reductions hold
// blocks of the pool, which the next units need, or if sums over the replicas wait for the host.
size_t Reduction::most_beside(UnitId unit) const {
  if (is_in_flight(unit)) {
    return 0; // the backward reduces the unit a second time
  }
  const UnitMesh& mesh = facts_.mesh_of(unit);
  const bool is_limited = mesh.shards_gradients || facts_.takes_scratch(unit) ||
      facts_.hands_sums_across(unit) ||
      (mesh.communicates() &&
       std::ranges::any_of(facts_.layout_of(unit).regions(), &Region::has_wire));
  return is_limited ? facts_.options.sharding.reductions - 1 : in_flight_.size();
}

bool Reduction::is_in_flight(UnitId unit) const {
  return std::ranges::any_of(
      in_flight_, [&](const std::vector<Key>& keys) { return keys[0].first == unit; });
}

void Reduction::finish(Steps& steps) {
  complete_until(0, steps);
  for (const Key& key : state_.regions()) {
    if (state_.of(key).across) {
      wait_across(key, steps);
      grad_ready(key, steps);
    }
  }
}

// After a failed step the held blocks are unknown, so this frees every block.
void Reduction::reset(Steps& steps) {
  in_flight_.clear();
  for (const Key& key : state_.regions()) {
    RegionState& state = state_.of(key);
    // `.grad` shows local sums in the persistent memory, as under DistributedDataParallel.
    const bool stays = state.local && !facts_.mesh_of(key.first).shards_gradients;
    state.local = stays;
    state.across = false;
    state.result = Memory::Kept; // Reducer::reset() has waited for copies to the host
    steps.run(make_step(StepKind::Wait, key));
    for (const Memory memory : kBlocks) {
      state.held[memory] = true;
    }
    free_all(key, Memory::Kept, steps);
    for (const int param : facts_.region_of(key).params) {
      ParamState& own = state_.params(key.first)[param];
      own.local = own.local && stays;
    }
  }
}

// -- packing --------------------------------------------------------------------------------

Memory Reduction::target(Key key, bool holds) const {
  const bool to_wire = facts_.is_wired(key) && !holds && !state_.of(key).local;
  return to_wire ? Memory::Wire : Memory::FullGrad;
}

// Returns whether local sums stay unscaled, so that `.grad` can show them. They cannot stay
// unscaled beside a reduced gradient, of which this rank has only its own part.
bool Reduction::holds_unscaled(Key key) const {
  const UnitMesh& mesh = facts_.mesh_of(key.first);
  return !mesh.shards_gradients &&
      ((!mesh.shards_optimizer && !mesh.shards_across) || !state_.any_valid(key));
}

// Returns whether every rank can add its kept gradients to the next average.
bool Reduction::can_average_again(Key key) const {
  const UnitMesh& mesh = facts_.mesh_of(key.first);
  const bool is_replicated =
      !mesh.shards_gradients && !mesh.shards_optimizer && !mesh.shards_across;
  return is_replicated && !facts_.is_wired(key) && !facts_.offloads_grads() &&
      state_.any_valid(key);
}

void Reduction::pack(Key key, bool holds, bool averages, Steps& steps) {
  RegionState& state = state_.of(key);
  state.kept = true;
  steps.run(make_step(StepKind::Take, key));
  if (facts_.is_wired(key) && !holds) {
    take(key, Memory::Wire, steps);
  }
  Step step = make_move(How::Pack, key, Memory::Kept, target(key, holds));
  if (facts_.mesh_of(key.first).shards_gradients && step.to == Memory::FullGrad) {
    take(key, Memory::FullGrad, steps);
  }
  if (!state.local || !state_.any_summed(key)) {
    state.is_unscaled = (holds && holds_unscaled(key)) || (averages && can_average_again(key));
  }
  const bool to_wire = step.to == Memory::Wire;
  const bool splits = facts_.splits_scale(key);
  step.scale = state.is_unscaled ? ScalePart::None
      : to_wire && splits        ? ScalePart::Packed
                                 : ScalePart::All;
  steps.run(step);
  const bool wires = facts_.is_wired(key) && !holds && !to_wire;
  if (wires || (state.is_unscaled && !holds)) {
    step.how = How::Cast;
    step.from = Memory::FullGrad;
    step.to = wires ? Memory::Wire : Memory::FullGrad;
    step.scale = state.is_unscaled ? (wires && splits ? ScalePart::Packed : ScalePart::All)
        : splits                   ? ScalePart::RestUndone
                                   : ScalePart::None;
    steps.run(step);
    state.is_unscaled = false;
  }
  // Reduced values are not among the packed ones, so the reduction must add them.
  state.adds = (to_wire || facts_.mesh_of(key.first).shards_gradients) && state_.any_valid(key);
  state.local = holds;
  for (const int param : facts_.region_of(key).params) {
    state_.params(key.first)[param].local = true;
  }
}

void Reduction::take(Key key, Memory memory, Steps& steps) {
  if (std::exchange(state_.of(key).held[memory], true)) {
    return;
  }
  Step step = make_step(StepKind::Take, key, Memory::Kept, memory);
  step.nbytes = facts_.nbytes_at(key, memory);
  if (memory == Memory::Scratch) {
    step.stream = StreamRole::ReduceScatter;
  }
  steps.run(step);
}

void Reduction::free_all(Key key, Memory copied, Steps& steps) {
  for (const Memory memory : kBlocks) {
    if (std::exchange(state_.of(key).held[memory], false)) {
      Step step = make_step(StepKind::Free, key, memory);
      step.nbytes = facts_.nbytes_at(key, memory);
      if (facts_.offloads_grads() && memory == copied) {
        step.stream = StreamRole::DeviceToHost;
      }
      steps.run(step);
    }
  }
}

Range Reduction::added(const Step& pack, int param) const {
  const Key key{pack.unit, pack.region};
  const UnitMesh& mesh = facts_.mesh_of(pack.unit);
  const Range place = facts_.layout_of(pack.unit).places().at(param).range();
  const Range none{place.begin, place.begin};
  const ParamState& state = state_.params(pack.unit)[param];
  if (pack.to == Memory::Wire) {
    return none;
  }
  if (state_.of(key).local) {
    return state.local ? place : none;
  }
  // The next sum must contain a reduced value once, from one of the ranks that hold it. It must
  // contain an unscaled local sum from every rank.
  if (mesh.shards_gradients || !state.valid ||
      !(mesh.is_first_holder() || state_.of(key).is_unscaled)) {
    return none;
  }
  const Range kept = intersect(place, facts_.region_of(key).shard_range(mesh.shard()));
  return kept.empty() ? none : kept;
}

// -- reducing -------------------------------------------------------------------------------

void Reduction::issue(Key key, Steps& steps) {
  const UnitMesh& mesh = facts_.mesh_of(key.first);
  const bool scatters = mesh.shards_optimizer || mesh.sums_in_order;
  choose_result(key, steps);
  const Memory from = facts_.is_wired(key) ? Memory::Wire : Memory::FullGrad;
  Step step = make_step(StepKind::Start, key, from, state_.of(key).result);
  step.op = scatters ? TraceOp::ReduceScatter : TraceOp::AllReduce;
  step.parts = mesh.parts();
  step.nbytes = facts_.nbytes_at(key, step.from);
  steps.run(step);
}

// Chooses the memory for the result of the collective: the kept gradient if possible.
void Reduction::choose_result(Key key, Steps& steps) {
  RegionState& state = state_.of(key);
  const bool wired = facts_.is_wired(key);
  const bool sharded = facts_.mesh_of(key.first).shards_optimizer;
  state.result = wired ? Memory::Wire : facts_.offloads_grads() ? Memory::FullGrad : Memory::Kept;
  if (facts_.takes_scratch(key.first) ||
      (sharded && !wired && (state.adds || facts_.offloads_grads()))) {
    take(key, Memory::Scratch, steps);
    state.result = Memory::Scratch;
  }
}

void Reduction::complete_until(size_t most, Steps& steps) {
  std::vector<Key> oldest;
  for (; in_flight_.size() > most; in_flight_.pop_front()) {
    oldest.insert(oldest.end(), in_flight_.front().begin(), in_flight_.front().end());
  }
  if (!facts_.options.on_host && oldest.size() > 1) {
    // On a stream the last collective ends after the others: one wait for it is enough.
    steps.run(make_step(StepKind::Wait, oldest.back()));
  }
  for (const Key& key : oldest) {
    complete(key, steps);
  }
}

// Waits for a reduction and moves its result to the kept gradient.
void Reduction::complete(Key key, Steps& steps) {
  RegionState& state = state_.of(key);
  steps.run(make_step(StepKind::Wait, key));
  if (facts_.mesh_of(key.first).sums_in_order) {
    complete_in_order(key, steps);
  } else if (facts_.hands_sums_across(key.first)) {
    complete_across(key, steps);
  } else if (facts_.offloads_grads()) {
    if (facts_.mesh_of(key.first).parts() > 1) {
      sum_parts(key, Memory::Scratch, ScalePart::None, steps);
    }
    offload_grad(key, state.result, steps);
  } else if (state.result != Memory::Kept) {
    add_to_kept(key, state.result, facts_.mesh_of(key.first).parts(), steps);
  }
  free_all(key, state.result, steps);
  for (const int param : facts_.region_of(key).params) {
    state_.params(key.first)[param] = {/*valid=*/true, /*local=*/false};
  }
  if (!state.across) {
    grad_ready(key, steps);
  }
}

void Reduction::complete_in_order(Key key, Steps& steps) {
  const bool offloads = facts_.offloads_grads();
  if (offloads || facts_.mesh_of(key.first).sums_across()) {
    take(key, Memory::Sums, steps);
  }
  if (!offloads) {
    zero_invalid(key, steps);
  }
  Step last = make_move(How::Sum, key);
  last.to = offloads ? Memory::Sums : Memory::Kept;
  last.adds = state_.of(key).adds && !offloads;
  last.scale = rest_of_scale(key);
  state_.of(key).across = sum_in_order(facts_, last, steps);
  if (offloads) {
    wait_across(key, steps);
    offload_grad(key, Memory::Sums, steps);
  }
}

// With states on the host: reports to the engine that the kept gradient is final.
void Reduction::grad_ready(Key key, Steps& steps) {
  if (!facts_.options.sharding.tiers.has_host_states() || !final_[key.first]) {
    return;
  }
  Step step = make_step(StepKind::Ready, key);
  if (!facts_.offloads_grads()) { // else the trace has counted the copy to the host
    step.op = TraceOp::ToHost;
    step.nbytes = facts_.region_of(key).grad.itemsize * facts_.region_of(key).shard_numel;
  }
  steps.run(step);
}

void Reduction::complete_across(Key key, Steps& steps) {
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

// Sums the parts that an exchange has written to Scratch.
void Reduction::sum_parts(Key key, Memory to, ScalePart scale, Steps& steps) {
  Step step = make_move(How::Sum, key, Memory::Scratch, to);
  step.scale = scale;
  step.parts = facts_.mesh_of(key.first).parts();
  steps.run(step);
}

void Reduction::start_across(Key key, Memory from, Steps& steps) {
  Step step = make_step(StepKind::Start, key, from, facts_.last_result(key.first, from));
  step.op = facts_.mesh_of(key.first).shards_across ? TraceOp::ReduceScatter : TraceOp::AllReduce;
  step.axis = AxisName::Replicas;
  step.nbytes = facts_.result_nbytes(key);
  state_.of(key).across = facts_.options.on_host;
  steps.run(step);
}

void Reduction::wait_across(Key key, Steps& steps) {
  if (std::exchange(state_.of(key).across, false)) {
    steps.run(make_step(StepKind::Wait, key));
  }
}

// Zeroes stale gradients before the reduction adds to them.
void Reduction::zero_invalid(Key key, Steps& steps) {
  for (const int param : facts_.region_of(key).params) {
    if (state_.of(key).adds && !is_valid(key.first, param)) {
      Step step = make_move(How::Zero, key);
      step.param = param;
      steps.run(step);
    }
  }
}

void Reduction::offload_grad(Key key, Memory from, Steps& steps) {
  zero_invalid(key, steps);
  const Region& region = facts_.region_of(key);
  state_.of(key).result = from;
  Step step = make_move(How::Copy, key, from);
  step.op = TraceOp::ToHost;
  step.adds = state_.of(key).adds;
  const bool is_kept_type = from == Memory::FullGrad || from == Memory::Sums;
  const ElementType& type = is_kept_type ? region.grad : region.reduce;
  step.nbytes = type.itemsize * region.shard_numel;
  steps.run(step);
}

void Reduction::add_to_kept(Key key, Memory from, int64_t parts, Steps& steps) {
  zero_invalid(key, steps);
  Step step = make_move(How::Sum, key, facts_.last_result(key.first, from));
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
