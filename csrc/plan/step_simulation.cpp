// Plays one step on integers.
#include "plan/step_simulation.h"

#include <algorithm>

namespace zerocore {

namespace {

// The backward that mirrors a forward: outputs of each call, last first, and gradients when the
// unit's first call is left.
std::vector<BackwardEvent> mirrored(const std::vector<CallEvent>& order) {
  std::vector<BackwardEvent> events;
  std::unordered_map<UnitId, int> enters_left;
  for (const CallEvent& event : order) {
    enters_left[event.unit] += event.kind == EventKind::Enter ? 1 : 0;
  }
  for (size_t i = order.size(); i-- > 0;) {
    if (order[i].kind == EventKind::Exit && order[i].needs_backward) {
      events.push_back({false, static_cast<int32_t>(i)});
    } else if (order[i].kind == EventKind::Enter && --enters_left[order[i].unit] == 0) {
      events.push_back({true, order[i].unit});
    }
  }
  return events;
}

std::vector<UnitMesh> meshes_of(const std::vector<UnitPlan>& units, const PlanOptions& options) {
  std::vector<UnitMesh> meshes;
  for (const UnitPlan& unit : units) {
    const UnitMesh& mesh = options.meshes.at(unit.mesh);
    meshes.push_back(unit.near ? mesh : mesh.without_near());
  }
  return meshes;
}

std::vector<ReducedUnit> reduced_units(
    const std::vector<Layout>& layouts,
    const std::vector<UnitMesh>& meshes) {
  std::vector<ReducedUnit> units;
  for (size_t unit = 0; unit < meshes.size(); ++unit) {
    units.push_back({&layouts[unit], meshes[unit]});
  }
  return units;
}

} // namespace

StepSimulation::StepSimulation(
    const std::vector<UnitPlan>& units,
    const std::vector<CallEvent>& order,
    const PlanOptions& options,
    PoolMap pool)
    : options_(options),
      order_(order),
      backward_(options.backward.empty() ? mirrored(order) : options.backward),
      meshes_(meshes_of(units, options)),
      schedule_(
          meshes_,
          options.sharding,
          options.first_order.empty() ? order : options.first_order),
      layouts_(plan_layouts(units, options)),
      reduction_({options.sharding, options.sums_on_host}, reduced_units(layouts_, meshes_)),
      pool_(std::move(pool)),
      gathered_(units.size()) {
  for (size_t unit = 0; unit < layouts_.size(); ++unit) {
    unsharding_.emplace_back(
        static_cast<UnitId>(unit),
        meshes_[unit],
        options_.sharding.tiers,
        options_.sums_on_host,
        layouts_[unit]);
    schedule_.residency().set_staying(static_cast<UnitId>(unit), {units[unit].stays, false});
    schedule_.passes().set_reducible(
        static_cast<UnitId>(unit),
        std::ranges::any_of(layouts_[unit].regions(), &Region::requires_grad));
  }
}

void StepSimulation::run_steps() {
  step();
  events_.clear();
  step();
}

void StepSimulation::step() {
  Actions actions;
  for (UnitId unit = 0; unit < static_cast<UnitId>(layouts_.size()); ++unit) {
    if (!gathers_behind_step(unit)) {
      schedule_.invalidate(unit, actions);
    }
  }
  run(actions);
  for (int index = 0; index < options_.micro_batches; ++index) {
    sync_ = index == options_.micro_batches - 1;
    micro_batch();
  }
  // Gradients are dropped after the optimizer's step.
  for (size_t unit = 0; unit < layouts_.size(); ++unit) {
    for (size_t param = 0; param < layouts_[unit].places().size(); ++param) {
      reduction_.drop(static_cast<UnitId>(unit), static_cast<int>(param));
    }
  }
  optimizer_step();
}

bool StepSimulation::gathers_behind_step(UnitId unit) const {
  return meshes_[unit].gathers_behind_step(layouts_[unit], options_.sharding.tiers);
}

// Changes what is trained.
void StepSimulation::optimizer_step() {
  moment_ = 2 * static_cast<int32_t>(calls_.size()) + 1;
  Actions actions;
  for (UnitId unit = 0; unit < static_cast<UnitId>(layouts_.size()); ++unit) {
    gathered_[unit] =
        gathered_[unit] && std::ranges::none_of(layouts_[unit].regions(), &Region::requires_grad);
    if (gathers_behind_step(unit)) {
      schedule_.invalidate(unit, actions);
      schedule_.residency().unshard(unit, actions);
    }
  }
  run(actions);
}

void StepSimulation::micro_batch() {
  Actions actions;
  moment_ = 0;
  calls_.clear();
  schedule_.begin_pass(/*grad=*/true, actions);
  run(actions);
  forward(actions);
  schedule_.end_pass(actions);
  run(actions);
  for (Unsharding& unit : unsharding_) {
    unit.wait(*this);
  }
  schedule_.begin_backward();
  backward(actions);
  schedule_.end_backward(actions);
  moment_ = 2 * static_cast<int32_t>(calls_.size());
  run(actions);
  reduction_.finish(*this);
}

void StepSimulation::forward(Actions& actions) {
  for (const CallEvent& event : order_) {
    moment_ = static_cast<int32_t>(calls_.size());
    CallHandle call;
    if (event.kind == EventKind::Enter) {
      schedule_.enter(event.unit, true, actions);
    } else {
      call = schedule_.exit(event.unit, event.needs_backward, event.reads, actions);
    }
    calls_.push_back(call);
    run(actions);
    if (event.kind == EventKind::Enter) {
      unsharding_[event.unit].wait(*this);
    }
  }
}

void StepSimulation::backward(Actions& actions) {
  const auto num_events = static_cast<int32_t>(calls_.size());
  for (const BackwardEvent& event : backward_) {
    const int32_t mirrored = event.ready ? first_enter(event.index) : event.index;
    moment_ = std::max(moment_, 2 * num_events - 1 - mirrored);
    if (event.ready) {
      schedule_.walk().ready(event.index, actions);
    } else {
      schedule_.walk().pre_backward(calls_.at(event.index), actions);
    }
    run(actions);
    if (!event.ready) {
      unsharding_[calls_.at(event.index).unit].wait(*this);
    }
  }
}

// Index of the first Enter of a unit in the order.
int32_t StepSimulation::first_enter(UnitId unit) const {
  const auto found =
      std::ranges::find_if(order_, [&](const CallEvent& event) { return event.is_enter(unit); });
  return static_cast<int32_t>(found - order_.begin());
}

void StepSimulation::run(Actions& actions) {
  for (const Action& action : actions) {
    switch (action.kind) {
      case ActionKind::Unshard:
        unshard(action.unit);
        break;
      case ActionKind::Reshard:
        unsharding_[action.unit].reshard(*this);
        break;
      case ActionKind::Reduce:
        reduction_.reduce(action.unit, sync_, *this);
        break;
    }
  }
  actions.clear();
}

// Where full parameters stay, those that nothing updates are not gathered again.
void StepSimulation::unshard(UnitId unit) {
  const Layout& layout = layouts_[unit];
  const bool again = gathered_[unit];
  gathered_[unit] = true;
  unsharding_[unit].begin(
      meshes_[unit].shards_parameters ? layout.gathered_regions() : Tiers::trained_regions(layout),
      again,
      *this);
}

void StepSimulation::run(const Step& step) {
  if (step.kind == StepKind::Take && step.nbytes > 0) {
    const BlockKey key = block_of(step);
    pool_.acquire(key, step.nbytes, pool_.find_place(key, step.nbytes));
  } else if (step.kind == StepKind::Free && step.nbytes > 0) {
    pool_.release(block_of(step));
  } else if (step.op) {
    const UnitMesh& mesh = meshes_[step.unit];
    const bool communicates = step.kind == StepKind::Start;
    const AxisName axis = communicates ? mesh.axis(step.axis).name : AxisName::State;
    events_.push_back(
        {*step.op,
         step.unit,
         step.nbytes,
         pool_.stats().in_use_nbytes,
         moment_,
         axis,
         mesh.num_ranks(axis)});
  }
}

} // namespace zerocore
