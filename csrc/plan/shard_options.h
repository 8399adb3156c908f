// Options of a sharded model that decide what it communicates and holds: of its engine and its
// plan.
#pragma once

#include <cstdint>

#include "plan/tiers.h"

namespace zerocore {

// Each is read where it acts; what lies between hands the struct on.
struct ShardOptions {
  int64_t stage = 3; // see UnitMesh
  int prefetch = 1; // units gathered ahead
  int reductions = 1; // units reduced at a time, where reductions hold blocks of the pool
  bool hold_full = false; // stages 2, 3: full sums of gradients are kept while not syncing
  bool by_rows = false; // a shard is some rows of each parameter, see plan/layout.h
  bool shard_across = false; // the optimizer's states are sharded over the replicas, too
  bool sums_in_order = false; // of gradients, see Note [Sums in order]
  bool retain_last = true; // the unit that a forward leaves last stays for its backward
  Tiers tiers;
};

} // namespace zerocore
