// Predicts what one step communicates and holds, by driving the schedule that the runtime runs.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "plan/layout.h"
#include "plan/schedule.h"

namespace zerocore {

struct PlanOptions {
  int64_t stage = 3;
  int64_t world_size = 1;
  int prefetch = 1;
  bool exchanges = false; // reduce-scatter as an exchange and a local sum (gloo)
};

// One unit as the planner sees it.
struct UnitPlan {
  std::vector<ParamSpec> params;
};

struct PlannedEvent {
  TraceOp op = TraceOp::AllGather;
  UnitId unit = -1;
  int64_t nbytes = 0;
  int64_t pool_nbytes = 0; // in use right after
};

// Bytes on one rank, between steps except for the pool.
struct MemoryPlan {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t pool = 0; // peak of what is in use
};

// The events of a steady step: parameters have changed since the last forward, one forward in
// the given order, one backward in which every parameter takes part, no gradients kept from
// before.
std::vector<PlannedEvent> plan_events(
    const std::vector<UnitPlan>& units,
    const std::vector<CallEvent>& order,
    const PlanOptions& options);

// Bytes on `rank`; `optimizer_states` tensors of a parameter's size and dtype for each trainable
// parameter (2 for Adam).
MemoryPlan plan_memory(
    const std::vector<UnitPlan>& units,
    const std::vector<CallEvent>& order,
    const PlanOptions& options,
    int64_t rank,
    int64_t optimizer_states);

} // namespace zerocore
