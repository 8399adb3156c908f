// The parts that all units of a rank share; members are made in order and freed in reverse.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/unit/offloaded_states.h"
#include "engine/unit/unit.h"
#include "plan/call_order.h"
#include "plan/shard_options.h"
#include "watch/alarm.h"

namespace zerocore {

// The options of an engine.

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

class Resources {
 public:
  // The pool expects a step of the units in `order`, see BucketPool::expect.
  Resources(
      const EngineOptions& options,
      c10::Device device,
      const std::vector<UnitSpec>& units,
      const Instructions& order);
  Resources(const Resources&) = delete; // the contexts point to its members
  Resources& operator=(const Resources&) = delete;

  // Of a unit, by number of its mesh; the first one is the model's.
  const std::vector<UnitContext>& contexts() const {
    return contexts_;
  }
  const HandOverLog& hand_overs() const {
    return hand_overs_;
  }
  // Memory of the first mesh's shard group; none with one rank or without the option.
  std::optional<RegisteredStats> registered() const {
    return registered_ ? std::optional(registered_->stats()) : std::nullopt;
  }
  // As the groups of the mesh were given; null with one rank.
  Collectives* group_of(size_t mesh, AxisName axis) const {
    return groups_.at(mesh).of(axis);
  }

 private:
  // Each null if the mesh has no such group.
  struct MeshGroups {
    std::unique_ptr<Collectives> shard, replicas, near;

    MeshGroups(const GroupNames& names, const Streams& streams, Alarm* alarm, bool sums_in_order);
    Collectives* of(AxisName axis) const;
  };

  void register_memory();
  UnitContext make_context(const MeshGroups& groups, const ShardOptions& sharding);

  HandOverLog hand_overs_;
  Streams streams_;
  std::optional<RegisteredMemory> registered_;
  BucketPool pool_;
  Trace trace_;
  std::shared_ptr<Alarm> alarm_;
  std::vector<MeshGroups> groups_;
  std::unique_ptr<ControlChannel> control_;
  std::unique_ptr<HostStates> host_; // null if no state is on the host
  std::unique_ptr<DiskStates> disk_; // null if no state is on disk
  std::vector<UnitContext> contexts_;
};

} // namespace zerocore
