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

// Whether the full parameters of a unit come and go.
struct UnitGathers {
  bool gathers = true; // they have to be gathered at all
  bool releases = true; // they are given back after use (stage 3)

  static UnitGathers of(const UnitMesh& mesh) {
    return {mesh.shards_optimizer || mesh.shards_parameters, mesh.shards_parameters};
  }
};

struct ScheduleOptions {
  std::vector<UnitGathers> units;
  int prefetch = 1; // units gathered ahead
  bool retain_last = true; // see ShardOptions

  // By unit.
  static ScheduleOptions of(const std::vector<UnitMesh>& meshes, const ShardOptions& sharding) {
    ScheduleOptions options{{}, sharding.prefetch, sharding.retain_last};
    for (const UnitMesh& mesh : meshes) {
      options.units.push_back(UnitGathers::of(mesh));
    }
    return options;
  }
};

} // namespace zerocore
