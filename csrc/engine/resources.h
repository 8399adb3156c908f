// The parts that all units of a model share on this rank, and the options for making them.
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

// Names of the c10d process groups of a mesh; nullopt for a group without other ranks.
struct GroupNames {
  std::optional<std::string> shard; // the ranks to shard over
  std::optional<std::string> replicas; // the ranks that hold the same shards as this rank
  std::optional<std::string> near; // some ranks of `shard`, see Note [Near ranks]
  std::optional<std::string> reductions; // the ranks of `shard`, if reductions have a second group
  int64_t first_rank = 0; // the lowest rank of the mesh, in the default group
};

struct EngineOptions {
  ShardOptions sharding;
  // Groups by number of the mesh. The first mesh has all ranks of the model, the others a subset.
  std::vector<GroupNames> meshes;
  std::optional<std::string> control; // all ranks, on the CPU; nullopt if peers are simulated
  bool log_hand_overs = false; // logs hand-overs between streams on a CPU, which has no streams
  bool static_graph = false; // see Note [Static graphs]
  bool registered = false; // see Note [Registered memory]
  std::string alarm_name; // see AlarmOptions; empty for no alarm
  std::optional<double> stall_seconds = 0; // see AlarmOptions; 0 for no alarm
  int host_threads = 1; // threads that share the update of a unit on the host
};

// Owns the shared parts of a model. The order of members matters: they are freed in reverse.
class Resources {
 public:
  // `order` is the expected order of calls, from which the pool plans its arena.
  Resources(
      const EngineOptions& options,
      c10::Device device,
      const std::vector<UnitSpec>& units,
      const Instructions& order);
  Resources(const Resources&) = delete; // the contexts point to its members
  Resources& operator=(const Resources&) = delete;

  // Returns the contexts of units, by number of the mesh; the first mesh is the model's.
  const std::vector<UnitContext>& contexts() const {
    return contexts_;
  }
  const HandOverLog& hand_overs() const {
    return hand_overs_;
  }
  // Returns statistics of the registered memory of the first mesh's shard group; nullopt with one
  // rank or without the option.
  std::optional<RegisteredStats> registered() const {
    return registered_ ? std::optional(registered_->stats()) : std::nullopt;
  }
  // Returns the group of the mesh with this axis in its GroupNames, or null.
  Collectives* group_of(size_t mesh, AxisName axis) const {
    return groups_.at(mesh).of(axis);
  }

 private:
  // The groups of a mesh; null if the mesh has no such group.
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
