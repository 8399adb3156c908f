// Bytes and events of a step, from the simulation of one.
#include "plan/memory_plan.h"

#include <algorithm>

#include "plan/disk_layout.h"
#include "plan/stage_policy.h"
#include "plan/step_simulation.h"

namespace zerocore {

namespace {

// Adds the bytes that one unit holds between steps on the rank.
void add_unit(
    MemoryPlan& plan,
    const UnitPlan& unit,
    const Layout& layout,
    const PlanOptions& options,
    int64_t rank) {
  const StagePolicy policy = StagePolicy::of(options.sharding, options.world_size);
  const int64_t shard = policy.shards_optimizer() ? rank : 0;
  const Tiers& tiers = options.sharding.tiers;
  const Layout own = layout.of_shard(shard);
  int64_t on_disk = 0; // the disk's layout counts it
  const auto of = [&](Tier tier, int64_t& device, int64_t& host) -> int64_t& {
    return tier == Tier::Device ? device : tier == Tier::Host ? host : on_disk;
  };
  of(tiers.parameters, plan.parameters, plan.host.weights) +=
      policy.shards_parameters() ? own.nbytes() : layout.nbytes();
  of(tiers.states, plan.main_weights, plan.host.weights) +=
      own.retyped(&Region::main).nbytes_of(tiers.main_regions(layout));
  of(tiers.states, plan.host.weights, plan.host.weights) +=
      own.nbytes_of(tiers.sent_regions(layout));
  plan.host.gradients += own.retyped(&Region::grad).nbytes_of(tiers.landing_regions(layout));
  for (int i = 0; i < static_cast<int>(unit.params.size()); ++i) {
    const bool unused = std::find(unit.unused.begin(), unit.unused.end(), i) != unit.unused.end();
    if (unit.params[i].requires_grad && !unused) {
      const Region& region = layout.regions()[layout.places()[i].region];
      of(tiers.states, plan.optimizer, plan.host.optimizer) +=
          region.main.itemsize * layout.owned(i, shard).size();
    }
  }
}

} // namespace

std::vector<Layout> plan_layouts(const std::vector<UnitPlan>& units, const PlanOptions& options) {
  const StagePolicy policy = StagePolicy::of(options.sharding, options.world_size);
  std::vector<Layout> layouts;
  layouts.reserve(units.size());
  for (const UnitPlan& unit : units) {
    layouts.push_back(
        Layout::build(
            unit.params,
            policy.shards_optimizer() ? options.world_size : 1,
            options.sharding.by_rows));
  }
  return layouts;
}

PoolMap plan_pool(
    const std::vector<UnitPlan>& units,
    const std::vector<CallEvent>& order,
    const PlanOptions& options) {
  PlanOptions expected = options;
  expected.micro_batches = 1;
  expected.first_order.clear();
  expected.backward.clear();
  const std::vector<CallEvent>& first = options.first_order.empty() ? order : options.first_order;
  StepSimulation simulation(units, first, expected, PoolMap());
  simulation.run_steps();
  return simulation.arranged_pool();
}

std::vector<PlannedEvent> plan_events(
    const std::vector<UnitPlan>& units,
    const std::vector<CallEvent>& order,
    const PlanOptions& options) {
  StepSimulation simulation(units, order, options, plan_pool(units, order, options));
  simulation.run_steps();
  return simulation.events();
}

MemoryPlan plan_memory(
    const std::vector<UnitPlan>& units,
    const std::vector<CallEvent>& order,
    const PlanOptions& options,
    int64_t rank,
    int64_t optimizer_states) {
  StepSimulation simulation(units, order, options, plan_pool(units, order, options));
  simulation.run_steps();
  MemoryPlan plan;
  const bool on_host = options.sharding.tiers.gradients == Tier::Host;
  int64_t& gradients = on_host ? plan.host.gradients : plan.gradients;
  const StagePolicy policy = StagePolicy::of(options.sharding, options.world_size);
  DiskLayout disk(
      options.sharding.tiers, policy.shards_parameters(), policy.shards_optimizer() ? rank : 0);
  for (size_t i = 0; i < units.size(); ++i) {
    add_unit(plan, units[i], simulation.layout(i), options, rank);
    disk.add(simulation.layout(i));
    gradients += simulation.kept_gradients(i);
  }
  plan.optimizer *= optimizer_states;
  plan.host.optimizer *= optimizer_states;
  plan.host.buffers = disk.buffers_nbytes();
  plan.host.disk = disk.file_nbytes();
  plan.pool = simulation.pool().stats().peak_nbytes;
  plan.pool_reserved = simulation.pool().stats().peak_reserved_nbytes;
  return plan;
}

} // namespace zerocore
