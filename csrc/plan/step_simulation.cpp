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

bool is_trainable(const Region& region) {
  return region.requires_grad;
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
      policy_(StagePolicy::from_stage(options.stage, options.world_size)),
      schedule_(
          {static_cast<int>(units.size()),
           options.prefetch,
           policy_.shards_optimizer(),
           policy_.shards_parameters()},
          options.first_order.empty() ? order : options.first_order),
      layouts_(plan_layouts(units, options)),
      reduced_(units.size(), false),
      pool_(std::move(pool)) {
  for (const Layout& layout : layouts_) {
    const auto& regions = layout.regions();
    schedule_.set_reducible(
        static_cast<UnitId>(grads_.size()),
        std::any_of(regions.begin(), regions.end(), is_trainable));
    grads_.emplace_back(regions.size());
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
    schedule_.invalidate(unit, actions);
  }
  run(actions);
  for (int index = 0; index < options_.micro_batches; ++index) {
    sync_ = index == options_.micro_batches - 1;
    micro_batch();
  }
  for (std::vector<RegionGrads>& unit : grads_) {
    for (RegionGrads& grads : unit) {
      grads.valid = false; // gradients are dropped after the optimizer's step
    }
  }
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
  schedule_.begin_backward();
  backward(actions);
  schedule_.end_backward(actions);
  moment_ = 2 * static_cast<int32_t>(calls_.size());
  run(actions);
  complete();
}

void StepSimulation::forward(Actions& actions) {
  for (const CallEvent& event : order_) {
    moment_ = static_cast<int32_t>(calls_.size());
    CallHandle call;
    if (event.kind == EventKind::Enter) {
      schedule_.enter(event.unit, true, actions);
    } else {
      call = schedule_.exit(event.unit, event.needs_backward, actions);
    }
    calls_.emplace_back(event, call);
    run(actions);
  }
}

void StepSimulation::backward(Actions& actions) {
  const auto num_events = static_cast<int32_t>(calls_.size());
  for (const BackwardEvent& event : backward_) {
    const int32_t mirrored = event.ready ? first_enter(event.index) : event.index;
    moment_ = std::max(moment_, 2 * num_events - 1 - mirrored);
    if (event.ready) {
      schedule_.ready(event.index, actions);
    } else {
      schedule_.pre_backward(calls_.at(event.index).second, actions);
    }
    run(actions);
  }
}

// Index of the first Enter of a unit in the order.
int32_t StepSimulation::first_enter(UnitId unit) const {
  const auto found = std::find_if(order_.begin(), order_.end(), [&](const CallEvent& event) {
    return event.kind == EventKind::Enter && event.unit == unit;
  });
  return static_cast<int32_t>(found - order_.begin());
}

void StepSimulation::run(Actions& actions) {
  for (const Action& action : actions) {
    const Layout& layout = layouts_[action.unit];
    switch (action.kind) {
      case ActionKind::Unshard:
        unshard(action.unit, layout);
        break;
      case ActionKind::Reshard:
        if (layout.nbytes() > 0) {
          pool_.release({action.unit, BlockUse::Parameters});
        }
        add(TraceOp::Reshard, action.unit, layout.nbytes());
        break;
      case ActionKind::Reduce:
        reduce(action.unit, layout);
        break;
    }
  }
  actions.clear();
}

void StepSimulation::unshard(UnitId unit, const Layout& layout) {
  if (policy_.shards_parameters()) {
    take({unit, BlockUse::Parameters}, layout.nbytes());
    add(TraceOp::Unshard, unit, layout.nbytes());
  }
  // Where full parameters stay, those that nothing updates are not gathered again.
  for (const Region& region : layout.regions()) {
    if (policy_.shards_parameters() || region.requires_grad) {
      add(TraceOp::AllGather, unit, region.nbytes());
    }
  }
}

void StepSimulation::reduce(UnitId unit, const Layout& layout) {
  const bool held = !sync_ && (!policy_.shards_gradients() || options_.hold_full);
  const auto num_regions = static_cast<int>(layout.regions().size());
  if (uses_slots(layout) || (options_.sums_on_host && options_.num_replicas > 1)) {
    complete();
  }
  reduced_[unit] = true;
  if (options_.world_size * options_.num_replicas == 1) {
    return;
  }
  for (int region = 0; region < num_regions; ++region) {
    if (is_trainable(layout.regions()[region])) {
      attach(unit, layout, region, held);
    }
  }
  for (int region = 0; region < num_regions && !held; ++region) {
    if (is_trainable(layout.regions()[region])) {
      issue(unit, layout, region);
    }
  }
}

// Memory for what is packed, see Reducer::attach.
void StepSimulation::attach(UnitId unit, const Layout& layout, int index, bool held) {
  const Region& region = layout.regions()[index];
  RegionGrads& grads = grads_[unit][index];
  const bool to_wire = region.has_wire() && !held && !grads.local;
  if (region.has_wire() && !held) {
    grads.wire_slot = take({unit, BlockUse::Wire, index}, region.numel() * region.reduce.itemsize);
  }
  if (policy_.shards_gradients() && !to_wire && grads.full_slot == 0) {
    grads.full_slot =
        take({unit, BlockUse::Gradients, index}, region.numel() * region.grad.itemsize);
  }
  grads.adds = (policy_.shards_gradients() || to_wire) && grads.valid;
  grads.local = held;
}

void StepSimulation::issue(UnitId unit, const Layout& layout, int index) {
  const Region& region = layout.regions()[index];
  const bool sharded = policy_.shards_optimizer();
  const int64_t nbytes = region.numel() * region.reduce.itemsize;
  const int64_t shard_nbytes = region.shard_numel * region.reduce.itemsize;
  Reduction reduction{unit, index, 0, 0};
  if (sharded && options_.exchanges) {
    reduction.scratch_slot = take({unit, BlockUse::Scratch, index}, nbytes);
  } else if (sharded && grads_[unit][index].adds && !region.has_wire()) {
    reduction.scratch_slot = take({unit, BlockUse::Scratch, index}, shard_nbytes);
  }
  const bool only_replicas = options_.world_size == 1;
  add(sharded ? TraceOp::ReduceScatter : TraceOp::AllReduce, unit, nbytes, only_replicas);
  if (!only_replicas && options_.num_replicas > 1) {
    // On a device right behind the other, on the CPU once that is complete.
    const int64_t across_nbytes = sharded ? shard_nbytes : nbytes;
    if (options_.sums_on_host) {
      reduction.across_nbytes = across_nbytes;
    } else {
      add(TraceOp::AllReduce, unit, across_nbytes, /*across=*/true);
    }
  }
  in_flight_.push_back(reduction);
}

void StepSimulation::complete() {
  for (Reduction& reduction : in_flight_) {
    if (reduction.across_nbytes > 0) {
      add(TraceOp::AllReduce, reduction.unit, reduction.across_nbytes, /*across=*/true);
    }
    const auto [unit, region] = std::pair(reduction.unit, reduction.region);
    RegionGrads& grads = grads_[unit][region];
    give_back({unit, BlockUse::Scratch, region}, reduction.scratch_slot);
    give_back({unit, BlockUse::Wire, region}, grads.wire_slot);
    give_back({unit, BlockUse::Gradients, region}, grads.full_slot);
    grads.valid = true;
  }
  in_flight_.clear();
}

// Whether the reducer takes memory from the pool for the unit: one such reduction at a time.
bool StepSimulation::uses_slots(const Layout& layout) const {
  const auto& regions = layout.regions();
  return policy_.shards_gradients() || (policy_.shards_optimizer() && options_.exchanges) ||
      std::any_of(regions.begin(), regions.end(), [](const Region& region) {
           return region.has_wire();
         });
}

int64_t StepSimulation::take(const BlockKey& key, int64_t nbytes) {
  if (nbytes > 0) {
    pool_.acquire(key, nbytes, pool_.find_place(key, nbytes));
  }
  return nbytes;
}

void StepSimulation::give_back(const BlockKey& key, int64_t& slot) {
  if (std::exchange(slot, 0) > 0) {
    pool_.release(key);
  }
}

void StepSimulation::add(TraceOp op, UnitId unit, int64_t nbytes, bool across) {
  events_.push_back({op, unit, nbytes, pool_.stats().in_use_nbytes, moment_, across});
}

} // namespace zerocore
