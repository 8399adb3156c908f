// Simulates one step on integers.
#include "plan/memory_plan.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "plan/stage_policy.h"

namespace zerocore {

namespace {

// Slots of a pool that keeps every slot by its exact size, as the bucket pool does.
class PoolCount {
 public:
  void acquire(int64_t nbytes) {
    in_use_ += nbytes;
    peak_ = std::max(peak_, in_use_);
    Count& count = counts_[nbytes];
    if (++count.in_use > count.reserved) {
      count.reserved = count.in_use;
      reserved_ += nbytes;
    }
  }
  void release(int64_t nbytes) {
    in_use_ -= nbytes;
    --counts_.at(nbytes).in_use;
  }
  int64_t in_use() const {
    return in_use_;
  }
  int64_t peak() const {
    return peak_;
  }
  int64_t reserved() const {
    return reserved_;
  }

 private:
  struct Count {
    int64_t in_use = 0;
    int64_t reserved = 0;
  };
  std::unordered_map<int64_t, Count> counts_;
  int64_t in_use_ = 0;
  int64_t peak_ = 0;
  int64_t reserved_ = 0;
};

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

// Plays the schedule's actions as the engine does, with sizes in place of memory.
class Simulation {
 public:
  Simulation(
      const std::vector<UnitPlan>& units,
      const std::vector<CallEvent>& order,
      const PlanOptions& options)
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
        reduced_(units.size(), false) {
    for (size_t i = 0; i < layouts_.size(); ++i) {
      const auto& regions = layouts_[i].regions();
      schedule_.set_reducible(
          static_cast<UnitId>(i),
          std::any_of(regions.begin(), regions.end(), [](const Region& region) {
            return region.requires_grad;
          }));
    }
  }

  // The first step and a steady one; events() are those of the second.
  void run_steps() {
    step();
    events_.clear();
    step();
  }

  const std::vector<PlannedEvent>& events() const {
    return events_;
  }
  const PoolCount& pool() const {
    return pool_;
  }
  const Layout& layout(size_t unit) const {
    return layouts_[unit];
  }
  // Whether the unit's gradients were ever reduced.
  bool reduced(size_t unit) const {
    return reduced_[unit];
  }

 private:
  void step() {
    Actions actions;
    moment_ = 0;
    calls_.clear();
    for (UnitId unit = 0; unit < static_cast<UnitId>(layouts_.size()); ++unit) {
      schedule_.invalidate(unit, actions);
    }
    schedule_.begin_pass(/*grad=*/true, actions);
    run(actions);
    forward(actions);
    schedule_.end_pass(actions);
    run(actions);
    schedule_.prune(schedule_.called());
    schedule_.begin_backward();
    backward(actions);
    schedule_.end_backward(actions);
    moment_ = 2 * static_cast<int32_t>(calls_.size());
    run(actions);
    complete();
  }

  void forward(Actions& actions) {
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

  void backward(Actions& actions) {
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
  int32_t first_enter(UnitId unit) const {
    const auto found = std::find_if(order_.begin(), order_.end(), [&](const CallEvent& event) {
      return event.kind == EventKind::Enter && event.unit == unit;
    });
    return static_cast<int32_t>(found - order_.begin());
  }

  void run(Actions& actions) {
    for (const Action& action : actions) {
      const Layout& layout = layouts_[action.unit];
      switch (action.kind) {
        case ActionKind::Unshard:
          unshard(action.unit, layout);
          break;
        case ActionKind::Reshard:
          pool_.release(layout.nbytes());
          add(TraceOp::Reshard, action.unit, layout.nbytes());
          break;
        case ActionKind::Reduce:
          reduce(action.unit, layout);
          break;
      }
    }
    actions.clear();
  }

  void unshard(UnitId unit, const Layout& layout) {
    if (policy_.shards_parameters()) {
      pool_.acquire(layout.nbytes());
      add(TraceOp::Unshard, unit, layout.nbytes());
    }
    // Where full parameters stay, those that nothing updates are not gathered again.
    for (const Region& region : layout.regions()) {
      if (policy_.shards_parameters() || region.requires_grad) {
        add(TraceOp::AllGather, unit, region.nbytes());
      }
    }
  }

  void reduce(UnitId unit, const Layout& layout) {
    if (uses_slots(layout)) {
      complete();
    }
    reduced_[unit] = true;
    for (const Region& region : layout.regions()) {
      if (!region.requires_grad || options_.world_size * options_.num_replicas == 1) {
        continue;
      }
      in_flight_.push_back({unit, {}, 0});
      const bool sharded = policy_.shards_optimizer();
      const int64_t nbytes = region.numel() * region.reduce.itemsize;
      if (policy_.shards_gradients() || region.has_wire()) {
        hold(nbytes);
      }
      if (sharded && options_.exchanges) {
        hold(nbytes);
      }
      add(sharded ? TraceOp::ReduceScatter : TraceOp::AllReduce, unit, nbytes);
      if (options_.world_size > 1 && options_.num_replicas > 1) {
        reduce_across(unit, sharded ? region.shard_numel * region.reduce.itemsize : nbytes);
      }
    }
  }

  // Whether the reducer takes memory from the pool for the unit: one such reduction at a time.
  bool uses_slots(const Layout& layout) const {
    const auto& regions = layout.regions();
    return policy_.shards_gradients() || (policy_.shards_optimizer() && options_.exchanges) ||
        std::any_of(regions.begin(), regions.end(), [](const Region& region) {
             return region.has_wire();
           });
  }

  // The sum over the replicas: on a device right behind the other, on gloo once that is complete.
  void reduce_across(UnitId unit, int64_t nbytes) {
    if (options_.exchanges) {
      in_flight_.back().across_nbytes = nbytes;
    } else {
      add(TraceOp::AllReduce, unit, nbytes);
    }
  }

  void hold(int64_t nbytes) {
    pool_.acquire(nbytes);
    in_flight_.back().slots.push_back(nbytes);
  }

  void complete() {
    for (const Reduction& reduction : in_flight_) {
      if (reduction.across_nbytes > 0) {
        add(TraceOp::AllReduce, reduction.unit, reduction.across_nbytes);
      }
      for (const int64_t nbytes : reduction.slots) {
        pool_.release(nbytes);
      }
    }
    in_flight_.clear();
  }

  void add(TraceOp op, UnitId unit, int64_t nbytes) {
    events_.push_back({op, unit, nbytes, pool_.in_use(), moment_});
  }

  PlanOptions options_;
  std::vector<CallEvent> order_;
  std::vector<BackwardEvent> backward_;
  StagePolicy policy_;
  Schedule schedule_;
  std::vector<Layout> layouts_;
  std::vector<std::pair<CallEvent, CallHandle>> calls_;
  std::vector<PlannedEvent> events_;
  std::vector<bool> reduced_;
  PoolCount pool_;
  struct Reduction {
    UnitId unit;
    std::vector<int64_t> slots; // bytes
    int64_t across_nbytes; // of the sum over the replicas that is still to come
  };
  std::vector<Reduction> in_flight_;
  int32_t moment_ = 0;
};

// What one unit holds between steps on the rank.
void add_unit(
    MemoryPlan& plan,
    const UnitPlan& unit,
    const Layout& layout,
    const PlanOptions& options,
    int64_t rank) {
  const StagePolicy policy = StagePolicy::from_stage(options.stage, options.world_size);
  const int64_t shard = policy.shards_optimizer() ? rank : 0;
  std::vector<int> main_regions;
  plan.parameters += policy.shards_parameters() ? layout.of_shard(rank).nbytes() : layout.nbytes();
  for (const Region& region : layout.regions()) {
    if (region.has_main()) {
      main_regions.push_back(static_cast<int>(&region - layout.regions().data()));
    }
  }
  plan.main_weights += layout.of_shard(shard).retyped(&Region::main).nbytes_of(main_regions);
  for (int i = 0; i < static_cast<int>(unit.params.size()); ++i) {
    const bool unused = std::find(unit.unused.begin(), unit.unused.end(), i) != unit.unused.end();
    if (unit.params[i].requires_grad && !unused) {
      const Region& region = layout.regions()[layout.places()[i].region];
      plan.optimizer += region.main.itemsize * layout.owned(i, shard).size();
    }
  }
}

int64_t kept_gradients(const Layout& layout, const PlanOptions& options) {
  const StagePolicy policy = StagePolicy::from_stage(options.stage, options.world_size);
  int64_t nbytes = 0;
  for (const Region& region : layout.regions()) {
    if (region.requires_grad) {
      const int64_t numel = policy.shards_gradients() ? region.shard_numel : region.numel();
      nbytes += region.grad.itemsize * numel;
    }
  }
  return nbytes;
}

} // namespace

std::vector<Layout> plan_layouts(const std::vector<UnitPlan>& units, const PlanOptions& options) {
  const StagePolicy policy = StagePolicy::from_stage(options.stage, options.world_size);
  std::vector<Layout> layouts;
  layouts.reserve(units.size());
  for (const UnitPlan& unit : units) {
    layouts.push_back(
        Layout::build(unit.params, policy.shards_optimizer() ? options.world_size : 1));
  }
  return layouts;
}

std::vector<PlannedEvent> plan_events(
    const std::vector<UnitPlan>& units,
    const std::vector<CallEvent>& order,
    const PlanOptions& options) {
  Simulation simulation(units, order, options);
  simulation.run_steps();
  return simulation.events();
}

MemoryPlan plan_memory(
    const std::vector<UnitPlan>& units,
    const std::vector<CallEvent>& order,
    const PlanOptions& options,
    int64_t rank,
    int64_t optimizer_states) {
  Simulation simulation(units, order, options);
  simulation.run_steps();
  MemoryPlan plan;
  for (size_t i = 0; i < units.size(); ++i) {
    add_unit(plan, units[i], simulation.layout(i), options, rank);
    plan.gradients += simulation.reduced(i) ? kept_gradients(simulation.layout(i), options) : 0;
  }
  plan.optimizer *= optimizer_states;
  plan.pool = simulation.pool().peak();
  plan.pool_reserved = simulation.pool().reserved();
  return plan;
}

} // namespace zerocore
