// Predicts what one step communicates and holds, by driving the schedule that the runtime runs.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "plan/layout.h"
#include "plan/pool_map.h"
#include "plan/schedule.h"
#include "plan/shard_options.h"
#include "plan/unit_mesh.h"

namespace zerocore {

// The engine hears of it in a backward: a unit's outputs get their gradient, or all of its
// gradients exist.
struct BackwardEvent {
  bool ready = false;
  int32_t index = 0; // of the Exit in the order; of the unit where it is ready

  bool operator==(const BackwardEvent&) const = default;
};

struct PlanOptions {
  ShardOptions sharding;
  std::vector<UnitMesh> meshes; // the first one is the model's
  int micro_batches = 1; // forwards and backwards of a step, all but the last under no_sync
  bool sums_on_host = false; // the CPU computes: sums over replicas start when it knows the first
  // The order that the schedule expects before it has seen a forward; empty for the order itself.
  Instructions first_order;
  // The backward as it was observed; empty for the mirrored forward.
  std::vector<BackwardEvent> backward;
};

// One unit as the planner sees it.
struct UnitPlan {
  std::vector<ParamSpec> params;
  std::vector<int> unused; // indices of parameters that no backward gives a gradient
  bool stays = false; // unsharded from its forward to its backward
  bool near = true; // gathers again from near ranks, where there are some
  int mesh = 0; // of the options
};

struct PlannedEvent {
  TraceOp op = TraceOp::AllGather;
  UnitId unit = -1;
  int64_t nbytes = 0;
  int64_t pool_nbytes = 0; // in use right after
  // When: at event i of the order in the forward, mirrored at 2n - 1 - i in the backward, 2n at
  // its end, 2n + 1 at the optimizer's step.
  int32_t moment = 0;
  AxisName axis = AxisName::State; // the ranks that communicate
  int64_t num_ranks = 1; // how many these are

  bool operator==(const PlannedEvent& other) const = default;
};

// Bytes on the host for one rank, see plan/host_layout.h; and in its file, see
// plan/disk_layout.h.
struct HostBytes {
  int64_t weights = 0; // main weights, these as layers compute with them, shards of parameters
  int64_t gradients = 0; // kept there, or sent there for the update
  int64_t optimizer = 0;
  int64_t buffers = 0; // for what is on disk, and gaps between the parts
  int64_t disk = 0;

  int64_t total() const {
    return weights + gradients + optimizer + buffers;
  }
};

// Bytes on one rank, between steps except for the pool.
struct MemoryPlan {
  int64_t parameters = 0;
  int64_t main_weights = 0; // optimizer's copies of parameters that compute in another dtype
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t pool = 0; // peak of what is in use
  int64_t pool_reserved = 0; // peak of what is taken from the device's allocator
  HostBytes host;

  // All that is taken from the device's allocator.
  int64_t total() const {
    return parameters + main_weights + gradients + optimizer + pool_reserved;
  }
};

std::vector<Layout> plan_layouts(const std::vector<UnitPlan>& units, const PlanOptions& options);

// Places of blocks in the pool as the runtime first gives them: for the expected step, one
// micro-batch of calls in the first order with a backward that mirrors it.
PoolMap plan_pool(
    const std::vector<UnitPlan>& units,
    const Instructions& order,
    const PlanOptions& options);

// The events of a steady step: parameters have changed since the last forward, forwards in the
// given order, each with a backward in which every parameter takes part, no gradients kept from
// before the step.
std::vector<PlannedEvent> plan_events(
    const std::vector<UnitPlan>& units,
    const Instructions& order,
    const PlanOptions& options);

// Bytes on the meshes' rank after two steps; `optimizer_states` tensors of a parameter's size and
// dtype (its main weight's if it has one) for each parameter that gets a gradient (2 for Adam).
MemoryPlan plan_memory(
    const std::vector<UnitPlan>& units,
    const Instructions& order,
    const PlanOptions& options,
    int64_t optimizer_states);

} // namespace zerocore
