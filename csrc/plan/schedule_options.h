// The options of a schedule, and the actions that it answers.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "plan/shard_options.h"
#include "plan/unit_mesh.h"

namespace zerocore {

enum class ActionKind : uint8_t { Unshard, Reshard, Reduce };

struct Action {
  ActionKind kind = ActionKind::Unshard;
  UnitId unit = -1;
};

using Actions = std::vector<Action>;

struct ScheduleOptions {
  int num_units = 0;
  int prefetch = 1; // units gathered ahead
  bool gathers = true; // parameters have to be gathered at all
  bool releases = true; // unsharded parameters are given back after use (stage 3)

  static ScheduleOptions of(int num_units, const ShardOptions& sharding, const UnitMesh& mesh) {
    const bool gathers = mesh.shards_optimizer() || mesh.shards_parameters();
    return {num_units, sharding.prefetch, gathers, mesh.shards_parameters()};
  }
};

} // namespace zerocore
