// Where gradients are packed, whether they add, when they are reduced.
#include "plan/reduction.h"

#include "common/math.h"
#include "plan/ordered_sums.h"

namespace zerocore {

Reduction::Reduction(const ReductionOptions& options, std::vector<ReducedUnit> units)
    : facts_(options, std::move(units)), blocks_(facts_) {
  for (const ReducedUnit& reduced : facts_.units) {
    UnitState& unit = units_.emplace_back();
    unit.params.resize(reduced.layout->places().size());
    for (const Region& region : reduced.layout->regions()) {
      unit.regions.emplace_back().trainable = region.requires_grad;
    }
  }
}

bool Reduction::reduce(UnitId unit, bool sync, GradSteps& steps) {
  const bool holds =
      !sync && (!facts_.mesh_of(unit).shards_gradients || facts_.options.sharding.hold_full);
  complete_until(most_beside(unit), steps);
  const std::vector<Key> keys = trained_regions(unit);
  for (const Key& key : keys) {
    pack(key, holds, steps);
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
        start_across(key, state_of(key).result, steps);
      }
    }
  } else if (!holds) {
    if (facts_.offloads_grads()) {
      for (const Key& key : keys) {
        offload_grad(key, GradBuffer::Full, steps);
        blocks_.give_back_all(key, GradBuffer::Full, steps);
      }
    }
    for (ParamState& param : units_[unit].params) {
      param = {/*valid=*/param.valid || param.local, /*local=*/false};
    }
    for (const Key& key : keys) {
      grad_ready(key, steps);
    }
  }
  return !holds;
}

std::vector<RegionKey> Reduction::trained_regions(UnitId unit) const {
  const std::vector<RegionState>& regions = units_.at(unit).regions;
  std::vector<Key> keys;
  for (int region = 0; region < static_cast<int>(regions.size()); ++region) {
    if (regions[region].trainable) {
      keys.emplace_back(unit, region);
    }
  }
  return keys;
}

// Units that may be in flight beside this one: few where they hold blocks of the pool, which the
// next ones then take, and where the sums over the replicas wait for the host.
size_t Reduction::most_beside(UnitId unit) const {
  const auto is_it = [&](const std::vector<Key>& keys) { return keys[0].first == unit; };
  if (std::ranges::any_of(in_flight_, is_it)) {
    return 0; // a second reduction in one backward
  }
  const UnitMesh& mesh = facts_.mesh_of(unit);
  const bool is_limited = mesh.shards_gradients || facts_.takes_scratch(unit) ||
      facts_.hands_across(unit) ||
      (mesh.communicates() &&
       std::ranges::any_of(facts_.layout_of(unit).regions(), &Region::has_wire));
  return is_limited ? facts_.options.sharding.reductions - 1 : in_flight_.size();
}

void Reduction::finish(GradSteps& steps) {
  complete_until(0, steps);
  for (UnitId unit = 0; unit < static_cast<UnitId>(units_.size()); ++unit) {
    for (int region = 0; region < static_cast<int>(units_[unit].regions.size()); ++region) {
      if (const Key key{unit, region}; state_of(key).across) {
        wait_across(key, steps);
        grad_ready(key, steps);
      }
    }
  }
}

// Steps that were decided may not have been carried out, so all blocks are given back.
void Reduction::reset(GradSteps& steps) {
  in_flight_.clear();
  for (UnitId unit = 0; unit < static_cast<UnitId>(units_.size()); ++unit) {
    for (int region = 0; region < static_cast<int>(units_[unit].regions.size()); ++region) {
      const Key key{unit, region};
      RegionState& state = state_of(key);
      state.local = false;
      state.across = false;
      state.result = GradBuffer::Kept; // whoever resets has waited for copies to the host
      steps.run(make_step(GradStepKind::Wait, key));
      steps.run(make_step(GradStepKind::WaitAcross, key));
      blocks_.reset(key, steps);
    }
    for (ParamState& param : units_[unit].params) {
      param.local = false;
    }
  }
}

// -- packing --------------------------------------------------------------------------------

void Reduction::pack(Key key, bool holds, GradSteps& steps) {
  RegionState& state = state_of(key);
  wait_across(key, steps);
  state.kept = true;
  steps.run(make_step(GradStepKind::Keep, key));
  const bool wired = facts_.is_wired(key) && !holds;
  const bool to_wire = wired && !state.local;
  if (wired) {
    blocks_.take(key, GradBuffer::Wire, steps);
  }
  const bool shards = facts_.mesh_of(key.first).shards_gradients;
  if (shards && !to_wire) {
    blocks_.take(key, GradBuffer::Full, steps);
  }
  GradStep step = make_step(GradStepKind::Pack, key);
  step.to = to_wire ? GradBuffer::Wire : GradBuffer::Full;
  step.scale = to_wire && facts_.splits_scale(key) ? ScalePart::Packed : ScalePart::All;
  steps.run(step);
  if (wired && !to_wire) {
    step.kind = GradStepKind::Cast;
    step.from = GradBuffer::Full;
    step.to = GradBuffer::Wire;
    step.scale = facts_.splits_scale(key) ? ScalePart::RestUndone : ScalePart::None;
    steps.run(step);
  }
  // Reduced values that lie in memory of their own, or in a part that the sums leave alone.
  state.adds = (shards || to_wire) && any_valid(key);
  state.local = holds;
  for (const int param : facts_.region_of(key).params) {
    units_[key.first].params[param].local = true;
  }
}

Range Reduction::added(const GradStep& pack, int param) const {
  const Layout& layout = facts_.layout_of(pack.unit);
  const UnitMesh& mesh = facts_.mesh_of(pack.unit);
  const Range place = layout.places().at(param).range();
  const Range none{place.begin, place.begin};
  const ParamState& state = units_[pack.unit].params[param];
  if (pack.to == GradBuffer::Wire) {
    return none;
  }
  if (units_[pack.unit].regions[pack.region].local) {
    return state.local ? place : none;
  }
  // A reduced value counts once in the next sum: on one of the ranks that own it.
  if (mesh.shards_gradients || !state.valid || !mesh.counts_kept()) {
    return none;
  }
  const Region& region = layout.regions()[pack.region];
  const Range kept = intersect(place, region.shard_range(mesh.shard()));
  return kept.empty() ? none : kept;
}

bool Reduction::any_valid(Key key) const {
  return std::ranges::any_of(
      facts_.region_of(key).params, [&](int param) { return is_valid(key.first, param); });
}

// -- reducing -------------------------------------------------------------------------------

void Reduction::issue(Key key, GradSteps& steps) {
  const bool scatters =
      facts_.mesh_of(key.first).shards_optimizer || facts_.sums_in_order(key.first);
  choose_result(key, steps);
  GradStep step = make_step(GradStepKind::Start, key);
  step.op = scatters ? TraceOp::ReduceScatter : TraceOp::AllReduce;
  step.from = facts_.is_wired(key) ? GradBuffer::Wire : GradBuffer::Full;
  step.to = state_of(key).result;
  step.parts = facts_.parts(key.first);
  step.nbytes = facts_.nbytes_at(key, step.from);
  steps.run(step);
}

// Where the collective leaves its result: in the gradient itself if it can.
void Reduction::choose_result(Key key, GradSteps& steps) {
  RegionState& state = state_of(key);
  const bool wired = facts_.is_wired(key);
  const bool sharded = facts_.mesh_of(key.first).shards_optimizer;
  state.result = wired          ? GradBuffer::Wire
      : facts_.offloads_grads() ? GradBuffer::Full
                                : GradBuffer::Kept;
  if (facts_.takes_scratch(key.first) ||
      (sharded && !wired && (state.adds || facts_.offloads_grads()))) {
    blocks_.take(key, GradBuffer::Scratch, steps);
    state.result = GradBuffer::Scratch;
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
  RegionState& state = state_of(key);
  wait(key, steps);
  if (facts_.sums_in_order(key.first)) {
    complete_in_order(key, steps);
  } else if (facts_.hands_across(key.first)) {
    complete_across(key, steps);
  } else if (facts_.offloads_grads()) {
    if (facts_.parts(key.first) > 1) {
      sum_parts(key, GradBuffer::Scratch, steps);
    }
    offload_grad(key, state.result, steps);
  } else if (state.result != GradBuffer::Kept) {
    add_to_kept(key, state.result, facts_.parts(key.first), steps);
  }
  blocks_.give_back_all(key, state.result, steps);
  for (const int param : facts_.region_of(key).params) {
    units_[key.first].params[param] = {/*valid=*/true, /*local=*/false};
  }
  if (!state.across) {
    grad_ready(key, steps);
  }
}

// See Note [Sums in order].
void Reduction::complete_in_order(Key key, GradSteps& steps) {
  const OrderedSums sums(facts_, key);
  if (sums.takes_block()) {
    blocks_.take(key, GradBuffer::Sums, steps);
  }
  if (!facts_.offloads_grads()) {
    zero_invalid(key, steps);
  }
  state_of(key).across = sums.complete(state_of(key).adds, steps);
  if (facts_.offloads_grads()) {
    wait_across(key, steps);
    offload_grad(key, GradBuffer::Sums, steps);
  }
}

void Reduction::grad_ready(Key key, GradSteps& steps) {
  if (facts_.options.sharding.tiers.has_host_states()) {
    steps.run(make_step(GradStepKind::GradReady, key));
  }
}

// See Note [Replicas].
void Reduction::complete_across(Key key, GradSteps& steps) {
  const RegionState& state = state_of(key);
  const bool in_place =
      !state.adds && !facts_.is_wired(key) && !facts_.mesh_of(key.first).shards_across;
  const GradBuffer sum = in_place ? GradBuffer::Kept : state.result;
  if (facts_.parts(key.first) > 1) {
    sum_parts(key, sum, steps);
  }
  start_across(key, sum, steps);
  if (!in_place) {
    wait_across(key, steps);
    add_to_kept(key, sum, 1, steps);
  }
}

// Of what an exchange has left.
void Reduction::sum_parts(Key key, GradBuffer to, GradSteps& steps) {
  GradStep step = make_step(GradStepKind::Sum, key);
  step.from = GradBuffer::Scratch;
  step.to = to;
  step.parts = facts_.parts(key.first);
  steps.run(step);
}

void Reduction::start_across(Key key, GradBuffer place, GradSteps& steps) {
  GradStep step = make_step(GradStepKind::StartAcross, key);
  step.op = facts_.mesh_of(key.first).shards_across ? TraceOp::ReduceScatter : TraceOp::AllReduce;
  step.from = place;
  step.to = facts_.last_result(key.first, place);
  step.nbytes = facts_.result_nbytes(key);
  state_of(key).across = facts_.options.on_host;
  steps.run(step);
}

void Reduction::wait_across(Key key, GradSteps& steps) {
  if (std::exchange(state_of(key).across, false)) {
    steps.run(make_step(GradStepKind::WaitAcross, key));
  }
}

// A gradient that is added to holds no old value.
void Reduction::zero_invalid(Key key, GradSteps& steps) {
  for (const int param : facts_.region_of(key).params) {
    if (state_of(key).adds && !is_valid(key.first, param)) {
      GradStep step = make_step(GradStepKind::Zero, key);
      step.param = param;
      steps.run(step);
    }
  }
}

void Reduction::offload_grad(Key key, GradBuffer from, GradSteps& steps) {
  zero_invalid(key, steps);
  const Region& region = facts_.region_of(key);
  state_of(key).result = from;
  GradStep step = make_step(GradStepKind::OffloadGrad, key);
  step.from = from;
  step.adds = state_of(key).adds;
  const bool is_kept_type = from == GradBuffer::Full || from == GradBuffer::Sums;
  const ElementType& type = is_kept_type ? region.grad : region.reduce;
  step.nbytes = type.itemsize * region.shard_numel;
  steps.run(step);
}

void Reduction::add_to_kept(Key key, GradBuffer from, int64_t parts, GradSteps& steps) {
  zero_invalid(key, steps);
  GradStep step = make_step(GradStepKind::Sum, key);
  step.from = facts_.last_result(key.first, from);
  const UnitMesh& mesh = facts_.mesh_of(key.first);
  step.parts = mesh.shards_across ? mesh.replicas.parts() : parts;
  step.adds = state_of(key).adds;
  step.scale = facts_.splits_scale(key) ? ScalePart::Rest : ScalePart::None;
  steps.run(step);
}

int64_t Reduction::kept_nbytes(UnitId unit) const {
  int64_t nbytes = 0;
  for (int region = 0; region < static_cast<int>(units_.at(unit).regions.size()); ++region) {
    if (units_[unit].regions[region].kept) {
      nbytes += facts_.nbytes_at({unit, region}, GradBuffer::Kept);
    }
  }
  return nbytes;
}

} // namespace zerocore
