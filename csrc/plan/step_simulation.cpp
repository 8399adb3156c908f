#include "plan/step_simulation.h"

#include <algorithm>

namespace zerocore {

namespace {

// Returns the backward that mirrors a forward: the calls, last first. A unit's gradients are ready
// when the backward has finished its first call.
std::vector<BackwardEvent> backward_of(const Instructions& order) {
  std::vector<BackwardEvent> events;
  for (size_t i = order.size(); i-- > 0;) {
    const auto begin = order.begin();
    const auto is_same = [&](const Instruction& each) { return each.is_enter(order[i].unit); };
    if (order[i].kind == InstructionKind::Exit && order[i].needs_backward) {
      events.push_back({false, static_cast<int32_t>(i)});
    } else if (
        order[i].kind == InstructionKind::Enter &&
        std::find_if(begin, begin + i, is_same) == begin + i) {
      events.push_back({true, order[i].unit});
    }
  }
  return events;
}

// Returns the events of a forward and its backward. The backward's times mirror the forward's.
std::vector<ScheduleEvent> micro_batch_of(
    const Instructions& order,
    const std::vector<BackwardEvent>& backward) {
  const auto num_events = static_cast<int32_t>(order.size());
  std::vector<ScheduleEvent> list = {{ScheduleEvent::BeginPass}};
  for (int32_t i = 0; i < num_events; ++i) {
    list.push_back(
        {order[i].kind == InstructionKind::Enter ? ScheduleEvent::Enter : ScheduleEvent::Exit,
         i,
         i});
  }
  list.push_back({ScheduleEvent::EndPass, -1, num_events - 1});
  list.push_back({ScheduleEvent::BeginBackward, -1, num_events - 1});
  for (const BackwardEvent& event : backward) {
    const auto first = std::ranges::find_if(
        order, [&](const Instruction& each) { return each.is_enter(event.index); });
    const auto mirrored = event.ready ? static_cast<int32_t>(first - order.begin()) : event.index;
    const int32_t moment = std::max(list.back().moment, 2 * num_events - 1 - mirrored);
    list.push_back({event.ready ? ScheduleEvent::Ready : ScheduleEvent::Pre, event.index, moment});
  }
  list.push_back({ScheduleEvent::EndBackward, -1, 2 * num_events});
  return list;
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
    const Instructions& order,
    const PlanOptions& options,
    PoolMap pool)
    : options_(options),
      order_(order),
      micro_batch_(
          micro_batch_of(order, options.backward.empty() ? backward_of(order) : options.backward)),
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
    std::ranges::for_each(micro_batch_, [this](const ScheduleEvent& event) { tell(event); });
  }
  // As zero_grad() does after each step.
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

void StepSimulation::tell(const ScheduleEvent& event) {
  Actions actions;
  moment_ = event.moment;
  tell_schedule(event, actions);
  run(actions);
  if (event.kind == ScheduleEvent::Enter) {
    unsharding_[order_[event.index].unit].wait(*this);
  } else if (event.kind == ScheduleEvent::Pre) {
    unsharding_[calls_.at(event.index).unit].wait(*this);
  } else if (event.kind == ScheduleEvent::EndPass) {
    std::ranges::for_each(unsharding_, [this](Unsharding& unit) { unit.wait(*this); });
  } else if (event.kind == ScheduleEvent::EndBackward) {
    reduction_.finish(*this);
  }
}

void StepSimulation::tell_schedule(const ScheduleEvent& event, Actions& actions) {
  switch (event.kind) {
    case ScheduleEvent::BeginPass:
      calls_.assign(order_.size(), {});
      schedule_.begin_pass(/*grad=*/true, actions);
      break;
    case ScheduleEvent::Enter:
      schedule_.enter(order_[event.index].unit, true, actions);
      break;
    case ScheduleEvent::Exit: {
      const Instruction& exit = order_[event.index];
      calls_[event.index] = schedule_.exit(exit.unit, exit.needs_backward, exit.reads, actions);
      break;
    }
    case ScheduleEvent::EndPass:
      schedule_.end_pass(actions);
      break;
    case ScheduleEvent::BeginBackward:
      schedule_.begin_backward();
      break;
    case ScheduleEvent::Pre:
      schedule_.pre_backward(calls_.at(event.index), actions);
      break;
    case ScheduleEvent::Ready:
      schedule_.ready(event.index, actions);
      break;
    case ScheduleEvent::EndBackward:
      schedule_.end_backward(actions);
      break;
  }
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

// If full parameters are persistent, frozen ones are gathered only once.
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
