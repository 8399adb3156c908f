#include "plan/memory_plan.h"

#include <algorithm>

#include "plan/state_layout.h"
#include "plan/step_simulation.h"

namespace zerocore {

namespace {

// Adds the bytes that one unit needs between steps on the device, and its moments.
void add_unit(
    MemoryPlan& plan,
    const UnitPlan& unit,
    const Layout& layout,
    const UnitMesh& mesh,
    const Tiers& tiers) {
  const Layout own = layout.of_shard(mesh.shard());
  if (tiers.parameters == Tier::Device) {
    plan.parameters += mesh.shards_parameters ? own.nbytes() : layout.nbytes();
  }
  plan.parameters += mesh.near_nbytes(layout.nbytes());
  if (tiers.states == Tier::Device) {
    plan.main_weights += own.retyped(&Region::main).nbytes_of(tiers.main_regions(layout));
  }
  int64_t on_disk = 0; // ignored: DiskLayout counts the bytes on disk
  int64_t& moments = tiers.states == Tier::Device ? plan.optimizer
      : tiers.states == Tier::Host                ? plan.host.optimizer
                                                  : on_disk;
  for (int i = 0; i < static_cast<int>(unit.params.size()); ++i) {
    const bool unused = std::find(unit.unused.begin(), unit.unused.end(), i) != unit.unused.end();
    if (unit.params[i].requires_grad && !unused) {
      const Region& region = layout.regions()[layout.places()[i].region];
      moments += region.main.itemsize * layout.owned(i, mesh.shard()).size();
    }
  }
}

} // namespace

std::vector<Layout> plan_layouts(const std::vector<UnitPlan>& units, const PlanOptions& options) {
  std::vector<Layout> layouts;
  layouts.reserve(units.size());
  for (const UnitPlan& unit : units) {
    const UnitMesh& mesh = options.meshes.at(unit.mesh);
    layouts.push_back(mesh.layout_of(unit.params, options.sharding.by_rows));
  }
  return layouts;
}

PoolMap plan_pool(
    const std::vector<UnitPlan>& units,
    const Instructions& order,
    const PlanOptions& options) {
  PlanOptions expected = options;
  expected.micro_batches = 1;
  expected.first_order.clear();
  expected.backward.clear();
  const Instructions& first = options.first_order.empty() ? order : options.first_order;
  StepSimulation simulation(units, first, expected, PoolMap());
  simulation.run_steps();
  return simulation.pool().arranged();
}

std::vector<PlannedEvent> plan_events(
    const std::vector<UnitPlan>& units,
    const Instructions& order,
    const PlanOptions& options) {
  StepSimulation simulation(units, order, options, plan_pool(units, order, options));
  simulation.run_steps();
  return simulation.events();
}

MemoryPlan plan_memory(
    const std::vector<UnitPlan>& units,
    const Instructions& order,
    const PlanOptions& options,
    int64_t optimizer_states) {
  StepSimulation simulation(units, order, options, plan_pool(units, order, options));
  simulation.run_steps();
  MemoryPlan plan;
  const Tiers& tiers = options.sharding.tiers;
  HostLayout host(tiers, tiers.lands_gradients(options.sums_on_host));
  DiskLayout disk(tiers);
  for (size_t i = 0; i < units.size(); ++i) {
    const Layout& layout = simulation.layout(i);
    const UnitMesh& mesh = simulation.mesh(i);
    add_unit(plan, units[i], layout, mesh, tiers);
    host.add(layout, mesh);
    disk.add(layout, mesh);
    plan.gradients += tiers.gradients == Tier::Device ? simulation.kept_gradients(i) : 0;
  }
  plan.optimizer *= optimizer_states;
  plan.host.optimizer *= optimizer_states;
  plan.host.weights = host.weights_nbytes();
  plan.host.gradients = host.gradients_nbytes();
  plan.host.buffers = host.gaps_nbytes() + disk.buffers_nbytes();
  plan.host.disk = disk.file_nbytes();
  plan.pool = simulation.pool().stats().peak_nbytes;
  plan.pool_reserved = simulation.pool().stats().peak_reserved_nbytes;
  return plan;
}

} // namespace zerocore
