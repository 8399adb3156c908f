// Predicts the collectives and the memory of one step. It drives the runtime's own schedule.
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

// An event of a backward. The outputs of a call get their gradient, or (`ready`) the last gradient
// of a unit arrives.
struct BackwardEvent {
  bool ready = false;
  int32_t index = 0; // index of the call's Exit in the order; if `ready`, the unit

  bool operator==(const BackwardEvent&) const = default;
};

struct PlanOptions {
  ShardOptions sharding;
  std::vector<UnitMesh> meshes; // the first mesh is the model's
  int micro_batches = 1; // forwards and backwards of a step; all but the last under no_sync
  bool sums_on_host = false; // the CPU computes, see Note [Replicas]
  // The order that the schedule expects in the first forward; if empty, the planned order.
  Instructions first_order;
  // The observed events of a backward; if empty, the backward mirrors the forward.
  std::vector<BackwardEvent> backward;
};

// One unit as the planner sees it.
struct UnitPlan {
  std::vector<ParamSpec> params;
  std::vector<int> unused; // indices of parameters that get no gradient
  bool stays = false; // unsharded from its forward to its backward
  bool near = true; // later gathers come from near ranks, if the mesh has any
  int mesh = 0; // number of its mesh in the options
};

struct PlannedEvent {
  TraceOp op = TraceOp::AllGather;
  UnitId unit = -1;
  int64_t nbytes = 0;
  int64_t pool_nbytes = 0; // bytes of the pool in use right after the event
  // The event's time, for an order of n events: i at event i of the forward, 2n - 1 - i at its
  // mirror in the backward, 2n at the end of the backward, 2n + 1 at the optimizer's step.
  int32_t moment = 0;
  AxisName axis = AxisName::State; // the axis whose ranks communicate
  int64_t num_ranks = 1; // number of ranks on the axis

  bool operator==(const PlannedEvent& other) const = default;
};

// Bytes of one rank on the host and in its file, see plan/state_layout.h.
struct HostBytes {
  int64_t weights = 0; // main weights, their casts for sending, and shards of parameters
  int64_t gradients = 0; // gradients kept on the host, or sent there for the update
  int64_t optimizer = 0;
  int64_t buffers = 0; // buffers of states on disk, and gaps between the parts
  int64_t disk = 0;

  int64_t total() const {
    return weights + gradients + optimizer + buffers;
  }
};

// Bytes on one rank, between steps except for the pool.
struct MemoryPlan {
  int64_t parameters = 0;
  int64_t main_weights = 0; // see Note [Main and model weights]
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t pool = 0; // peak of the bytes in use
  int64_t pool_reserved = 0; // peak of the bytes from the device's allocator
  HostBytes host;

  // Returns all bytes from the device's allocator.
  int64_t total() const {
    return parameters + main_weights + gradients + optimizer + pool_reserved;
  }
};

std::vector<Layout> plan_layouts(const std::vector<UnitPlan>& units, const PlanOptions& options);

// Returns the first places of blocks in the pool. They fit the expected step: one micro-batch of
// calls in the first order, with a backward that mirrors it.
PoolMap plan_pool(
    const std::vector<UnitPlan>& units,
    const Instructions& order,
    const PlanOptions& options);

// Returns the events of a steady step. Parameters have changed since the last forward. Forwards
// follow `order`; each has a backward that uses every parameter. No gradients exist before the
// step.
std::vector<PlannedEvent> plan_events(
    const std::vector<UnitPlan>& units,
    const Instructions& order,
    const PlanOptions& options);

// Returns the bytes on the meshes' rank after two steps. For each parameter that gets a gradient
// the optimizer holds `optimizer_states` tensors (2 for Adam), in the size and dtype of the main
// weight, or of the parameter if it has none.
MemoryPlan plan_memory(
    const std::vector<UnitPlan>& units,
    const Instructions& order,
    const PlanOptions& options,
    int64_t optimizer_states);

} // namespace zerocore
