// The parts of an engine that its units use, and the settings of a unit.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/collectives.h"
#include "comm/control_channel.h"
#include "memory/bucket.h"
#include "memory/bucket_pool.h"
#include "memory/registered_memory.h"
#include "plan/shard_options.h"
#include "plan/state_layout.h"
#include "plan/unit_mesh.h"

namespace zerocore {

class Alarm;
class DiskStates;
class HostStates;

// The parts that the units of one mesh share. `Resources` owns them.
struct UnitContext {
  UnitMesh mesh;
  int64_t first_rank = 0; // the lowest rank of the mesh, in the default group
  Collectives* collectives = nullptr; // over mesh.state; null if that has one rank
  Collectives* replicas = nullptr; // over mesh.replicas; null if that has one rank
  Collectives* near = nullptr; // over mesh.near; null if that has one rank
  ControlChannel* control = nullptr; // all ranks; null if there is one, or peers are simulated
  Streams* streams = nullptr;
  Alarm* alarm = nullptr; // null if the model has no alarm
  BucketPool* pool = nullptr;
  RegisteredMemory* registered = nullptr; // null if none is registered
  Trace* trace = nullptr;
  bool by_rows = false; // see Note [Shards of rows]
  Tiers tiers; // see Note [States on the host]
  HostStates* host = nullptr; // null if no state is on the host
  DiskStates* disk = nullptr; // null if no state is on disk

  Collectives& collectives_of(AxisName axis) const {
    return axis == AxisName::State ? *collectives : axis == AxisName::Near ? *near : *replicas;
  }
  c10::Device device_of(Tier tier) const {
    return tier == Tier::Device ? streams->device() : c10::Device(c10::kCPU);
  }
  // Returns whether a device's gradients are copied to the host and kept there, see Note [Gradients
  // of a device on the host].
  bool lands_gradients() const {
    return tiers.lands_gradients(!streams->has_streams());
  }
  // Returns memory in `tier` for the bucket of one of the unit's parts.
  c10::DataPtr memory_of(Tier tier, UnitId unit, Memory part, const Bucket& bucket) const;
  // Allocates memory for the storage of `bytes` on its device.
  c10::DataPtr memory_for(const at::Tensor& bytes) const {
    const auto nbytes = static_cast<int64_t>(bytes.storage().nbytes());
    return registered == nullptr ? allocate_memory(bytes.device(), nbytes)
                                 : registered->memory_for(bytes);
  }
  // Adds an event of a unit to the trace. Returns null if nothing is traced.
  std::shared_ptr<OpenRecord> note(TraceOp op, UnitId unit, int64_t nbytes) const {
    return trace->add(op, unit, nbytes, pool->stats().in_use_nbytes);
  }
  // Returns for each flag whether any rank sets it. Collective; the host waits.
  std::vector<bool> any_rank(
      const std::vector<bool>& flags,
      MessageKind kind = MessageKind::AnyFlags) const {
    return control == nullptr ? flags : control->any_rank(flags, kind);
  }
};

struct UnitSettings {
  double gradient_scale = 1; // multiplies the sum of gradients over the ranks
  bool syncs = true; // backward passes reduce the gradients
  bool stays = false; // unsharded from its forward to its backward
  OwnCollective gather = {}, reduce = {}; // the user's own, over mesh.state; may be empty
  // Receives each reduced gradient of a region before it is added to the kept one; may be empty.
  std::function<void(const at::Tensor&)> after_reduce = {};
};

} // namespace zerocore
