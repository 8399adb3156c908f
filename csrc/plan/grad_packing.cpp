// Where gradients are packed and whether they add.
#include "plan/grad_packing.h"

#include <array>
#include <utility>

#include "common/math.h"

namespace zerocore {

namespace {

// In the order in which they are given back.
constexpr std::array kGradBlocks = {Memory::Sums, Memory::Scratch, Memory::Wire, Memory::FullGrad};

} // namespace

Memory GradPacking::target(RegionKey key, bool holds) const {
  const bool to_wire = facts_.is_wired(key) && !holds && !state_.of(key).local;
  return to_wire ? Memory::Wire : Memory::FullGrad;
}

// Whether sums of this rank get their scale later: they are shown as they are, unless this rank has
// only its part of an average among them.
bool GradPacking::holds_bare(RegionKey key) const {
  const UnitMesh& mesh = facts_.mesh_of(key.first);
  return !mesh.shards_gradients &&
      ((!mesh.shards_optimizer && !mesh.shards_across) || !state_.any_valid(key));
}

void GradPacking::pack(RegionKey key, bool holds, GradSteps& steps) {
  RegionState& state = state_.of(key);
  state.kept = true;
  steps.run(make_step(GradStepKind::Keep, key));
  if (facts_.is_wired(key) && !holds) {
    take(key, Memory::Wire, steps);
  }
  GradStep step = make_step(GradStepKind::Pack, key);
  step.to = target(key, holds);
  if (facts_.mesh_of(key.first).shards_gradients && step.to == Memory::FullGrad) {
    take(key, Memory::FullGrad, steps);
  }
  if (!state.local || !state_.any_summed(key)) {
    state.is_bare = holds && holds_bare(key);
  }
  const bool to_wire = step.to == Memory::Wire;
  const bool splits = facts_.splits_scale(key);
  step.scale = state.is_bare ? ScalePart::None
      : to_wire && splits    ? ScalePart::Packed
                             : ScalePart::All;
  steps.run(step);
  const bool wires = facts_.is_wired(key) && !holds && !to_wire;
  if (wires || (state.is_bare && !holds)) {
    step.kind = GradStepKind::Cast;
    step.from = Memory::FullGrad;
    step.to = wires ? Memory::Wire : Memory::FullGrad;
    step.scale = state.is_bare ? (wires && splits ? ScalePart::Packed : ScalePart::All)
        : splits               ? ScalePart::RestUndone
                               : ScalePart::None;
    steps.run(step);
    state.is_bare = false;
  }
  // Reduced values that lie in memory of their own, or in a part that the sums leave alone.
  state.adds = (to_wire || facts_.mesh_of(key.first).shards_gradients) && state_.any_valid(key);
  state.local = holds;
  for (const int param : facts_.region_of(key).params) {
    state_.params(key.first)[param].local = true;
  }
}

void GradPacking::take(RegionKey key, Memory place, GradSteps& steps) {
  if (std::exchange(state_.of(key).held[place], true)) {
    return;
  }
  GradStep step = make_step(GradStepKind::Take, key, Memory::Kept, place);
  step.nbytes = facts_.nbytes_at(key, place);
  steps.run(step);
}

void GradPacking::give_back_all(RegionKey key, Memory copied, GradSteps& steps) {
  for (const Memory place : kGradBlocks) {
    if (std::exchange(state_.of(key).held[place], false)) {
      GradStep step = make_step(GradStepKind::GiveBack, key, place);
      step.nbytes = facts_.nbytes_at(key, place);
      if (facts_.offloads_grads() && place == copied) {
        step.last_use = StreamRole::DeviceToHost;
      }
      steps.run(step);
    }
  }
}

void GradPacking::reset(RegionKey key, GradSteps& steps) {
  for (const Memory memory : kGradBlocks) {
    state_.of(key).held[memory] = true;
  }
  give_back_all(key, Memory::Kept, steps);
}

Range GradPacking::added(const GradStep& pack, int param) const {
  const RegionKey key{pack.unit, pack.region};
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
  // A reduced value enters the next sum once, from one of the ranks that own it. A bare sum (this
  // rank's own, not scaled yet) enters it from every rank.
  if (mesh.shards_gradients || !state.valid || !(mesh.counts_kept() || state_.of(key).is_bare)) {
    return none;
  }
  const Range kept = intersect(place, facts_.region_of(key).shard_range(mesh.shard()));
  return kept.empty() ? none : kept;
}

} // namespace zerocore
