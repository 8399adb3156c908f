// The parts of an engine that its units share, and the settings of each unit.
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

// Shared by the units of a model; outlives them.
struct UnitContext {
  UnitMesh mesh;
  int64_t first_rank = 0; // of the mesh, in the default group
  Collectives* collectives = nullptr; // of mesh.state, null for one rank; as the next two
  Collectives* replicas = nullptr;
  Collectives* near = nullptr;
  ControlChannel* control =
      nullptr; // all ranks; null where there is one or the others are simulated
  Streams* streams = nullptr;
  Alarm* alarm = nullptr; // null for none
  BucketPool* pool = nullptr;
  RegisteredMemory* registered = nullptr; // null where none is offered or asked for
  Trace* trace = nullptr;
  bool by_rows = false; // see Note [Shards of rows]
  Tiers tiers; // see Note [States on the host]
  HostStates* host = nullptr; // null where nothing is on the host
  DiskStates* disk = nullptr; // null where nothing is on disk

  Collectives& collectives_of(AxisName axis) const {
    return axis == AxisName::State ? *collectives : axis == AxisName::Near ? *near : *replicas;
  }
  c10::Device device_of(Tier tier) const {
    return tier == Tier::Device ? streams->device() : c10::Device(c10::kCPU);
  }
  // Gradients are kept on the host and come off a device, see Note [Gradients of a device on the
  // host].
  bool lands_gradients() const {
    return tiers.lands_gradients(!streams->has_streams());
  }
  // For the bucket of a part of the unit, which lies in that tier.
  c10::DataPtr memory_of(Tier tier, UnitId unit, Memory part, const Bucket& bucket) const;
  // For the storage of `bytes`, outside of the tiers.
  c10::DataPtr memory_for(const at::Tensor& bytes) const {
    const auto nbytes = static_cast<int64_t>(bytes.storage().nbytes());
    return registered == nullptr ? allocate_memory(bytes.device(), nbytes)
                                 : registered->memory_for(bytes);
  }
  // Counts what happens to a unit now; null where it is not traced.
  std::shared_ptr<OpenRecord> note(TraceOp op, UnitId unit, int64_t nbytes) const {
    return trace->add(op, unit, nbytes, pool->stats().in_use_nbytes);
  }
  // For each flag whether it is set on any rank; blocks the host.
  std::vector<bool> any_rank(
      const std::vector<bool>& flags,
      MessageKind kind = MessageKind::AnyFlags) const {
    return control == nullptr ? flags : control->any_rank(flags, kind);
  }
};

// Settings of a unit.
struct UnitSettings {
  double gradient_scale = 1; // the sum of gradients over the ranks is multiplied by it
  bool syncs = true; // a backward reduces them
  bool stays = false; // after a forward, from the beginning; see UnitSpec
  OwnCollective gather = {},
                reduce = {}; // the program's, over the ranks that share the state; may be empty
  // Gets each reduced gradient, of a region, before it is added to the one that is kept; may be
  // empty.
  std::function<void(const at::Tensor&)> after_reduce = {};
};

} // namespace zerocore
