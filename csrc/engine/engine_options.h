// The options of an engine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/shard_options.h"

namespace zerocore {

// Names of the c10d groups of a mesh.
struct GroupNames {
  std::optional<std::string> shard; // the ranks to shard over; none for a world of one
  std::optional<std::string> replicas; // those that hold the same shards; none where nobody does
  std::optional<std::string> near; // of `shard`, see Note [Near ranks]; none where all are
  std::optional<std::string> reductions; // as `shard`, for reductions; none for the same one
  int64_t first_rank = 0; // of all of them, in the default group
};

struct EngineOptions {
  ShardOptions sharding;
  // By number of the mesh. The first one has all ranks of the model, another one some of them.
  std::vector<GroupNames> meshes;
  std::optional<std::string> control; // all ranks, on the CPU; none where they are simulated
  bool log_hand_overs = false; // on the CPU: as if there were streams
  bool static_graph = false; // see Note [Static graphs]
  bool registered = false; // see Note [Registered memory]
  std::string alarm_name; // see AlarmOptions; empty for no alarm
  std::optional<double> stall_seconds = 0; // see AlarmOptions; 0 for no alarm
  int host_threads = 1; // that share a unit's update on the host
};

} // namespace zerocore
