// Simulates one step on integers.
#include "plan/memory_plan.h"

#include <algorithm>
#include <utility>

#include "plan/stage_policy.h"

namespace zerocore {

namespace {

// Plays the schedule's actions as the engine does, with sizes in place of memory.
class Simulation {
 public:
  Simulation(
      const std::vector<UnitPlan>& units,
      const std::vector<CallEvent>& order,
      const PlanOptions& options)
      : options_(options),
        policy_(StagePolicy::from_stage(options.stage, options.world_size)),
        schedule_(
            {static_cast<int>(units.size()),
             options.prefetch,
             policy_.shards_optimizer(),
             policy_.shards_parameters()},
            order) {
    const int64_t num_shards = policy_.shards_optimizer() ? options.world_size : 1;
    for (const UnitPlan& unit : units) {
      layouts_.push_back(Layout::build(unit.params, num_shards));
      const auto& regions = layouts_.back().regions();
      schedule_.set_reducible(
          static_cast<UnitId>(layouts_.size()) - 1,
          std::any_of(regions.begin(), regions.end(), [](const Region& region) {
            return region.requires_grad;
          }));
    }
  }

  std::vector<PlannedEvent> step() {
    Actions actions;
    for (UnitId unit = 0; unit < static_cast<UnitId>(layouts_.size()); ++unit) {
      schedule_.invalidate(unit, actions);
    }
    schedule_.begin_pass(/*grad=*/true, actions);
    run(actions);
    forward(actions);
    schedule_.end_pass(actions);
    run(actions);
    schedule_.begin_backward();
    backward(actions);
    schedule_.end_backward(actions);
    run(actions);
    complete();
    return std::move(events_);
  }

 private:
  void forward(Actions& actions) {
    for (const CallEvent& event : std::vector<CallEvent>(schedule_.order())) {
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
    std::vector<int> enters_left(layouts_.size(), 0);
    for (const auto& [event, call] : calls_) {
      enters_left[event.unit] += event.kind == EventKind::Enter ? 1 : 0;
    }
    for (size_t i = calls_.size(); i-- > 0;) {
      const auto& [event, call] = calls_[i];
      if (event.kind == EventKind::Exit && event.needs_backward) {
        schedule_.pre_backward(call, actions);
      } else if (event.kind == EventKind::Enter && --enters_left[event.unit] == 0) {
        schedule_.ready(event.unit, actions);
      }
      run(actions);
    }
  }

  void run(Actions& actions) {
    for (const Action& action : actions) {
      const Layout& layout = layouts_[action.unit];
      switch (action.kind) {
        case ActionKind::Unshard:
          unshard(action.unit, layout);
          break;
        case ActionKind::Reshard:
          pool_ -= layout.nbytes();
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
      pool_ += layout.nbytes();
      add(TraceOp::Unshard, unit, layout.nbytes());
    }
    for (const Region& region : layout.regions()) {
      add(TraceOp::AllGather, unit, region.nbytes());
    }
  }

  void reduce(UnitId unit, const Layout& layout) {
    complete();
    for (const Region& region : layout.regions()) {
      if (!region.requires_grad || options_.world_size == 1) {
        continue;
      }
      const bool sharded = policy_.shards_optimizer();
      const int64_t bucket = policy_.shards_gradients() ? region.nbytes() : 0;
      const int64_t scratch = sharded && options_.exchanges ? region.nbytes() : 0;
      in_flight_ += bucket + scratch;
      pool_ += bucket + scratch;
      add(sharded ? TraceOp::ReduceScatter : TraceOp::AllReduce, unit, region.nbytes());
    }
  }

  void complete() {
    pool_ -= std::exchange(in_flight_, 0);
  }

  void add(TraceOp op, UnitId unit, int64_t nbytes) {
    events_.push_back({op, unit, nbytes, pool_});
  }

  PlanOptions options_;
  StagePolicy policy_;
  Schedule schedule_;
  std::vector<Layout> layouts_;
  std::vector<std::pair<CallEvent, CallHandle>> calls_;
  std::vector<PlannedEvent> events_;
  int64_t pool_ = 0;
  int64_t in_flight_ = 0; // pool bytes of the reduction under way
};

} // namespace

std::vector<PlannedEvent> plan_events(
    const std::vector<UnitPlan>& units,
    const std::vector<CallEvent>& order,
    const PlanOptions& options) {
  return Simulation(units, order, options).step();
}

MemoryPlan plan_memory(
    const std::vector<UnitPlan>& units,
    const std::vector<CallEvent>& order,
    const PlanOptions& options,
    int64_t rank,
    int64_t optimizer_states) {
  const StagePolicy policy = StagePolicy::from_stage(options.stage, options.world_size);
  const bool sharded = policy.shards_optimizer();
  MemoryPlan plan;
  for (const UnitPlan& unit : units) {
    const Layout layout = Layout::build(unit.params, sharded ? options.world_size : 1);
    plan.parameters +=
        policy.shards_parameters() ? layout.of_shard(rank).nbytes() : layout.nbytes();
    for (const Region& region : layout.regions()) {
      if (region.requires_grad) {
        plan.gradients += policy.shards_gradients() ? region.shard_nbytes() : region.nbytes();
      }
    }
    for (size_t i = 0; i < unit.params.size(); ++i) {
      if (unit.params[i].requires_grad) {
        plan.optimizer += optimizer_states * unit.params[i].itemsize *
            layout.owned(static_cast<int>(i), sharded ? rank : 0).size();
      }
    }
  }
  for (const PlannedEvent& event : plan_events(units, order, options)) {
    plan.pool = std::max(plan.pool, event.pool_nbytes);
  }
  return plan;
}

} // namespace zerocore
