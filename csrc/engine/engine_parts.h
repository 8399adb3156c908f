// The parts that an engine is wired from, made in order and freed in reverse.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/alarm_setup.h"
#include "engine/engine_options.h"
#include "engine/gradients/reducer.h"
#include "engine/offload/moments.h"
#include "engine/offload/offload.h"
#include "engine/thread_check.h"
#include "engine/unit/disk_states.h"
#include "engine/unit/host_states.h"
#include "engine/unit/unit.h"
#include "plan/memory_plan.h"
#include "plan/schedule.h"
#include "runtime/host_link.h"

namespace zerocore {

// Writes a unit's parameters into the modules that own them. Called from any thread.
class Registrar {
 public:
  virtual ~Registrar() = default;
  virtual void show(UnitId unit, bool full) = 0;
};

// Null where there is one rank.
struct GroupCollectives {
  std::unique_ptr<Collectives> shard, replicas, near;

  Collectives* of(AxisName axis) const {
    return (axis == AxisName::State ? shard : axis == AxisName::Replicas ? replicas : near).get();
  }
};

struct EngineParts {
  // `order` is the expected order of calls.
  EngineParts(
      const EngineOptions& engine_options,
      c10::Device device,
      std::vector<UnitSpec> specs,
      std::vector<CallEvent> order,
      std::unique_ptr<Registrar> registrar_);
  EngineParts(const EngineParts&) = delete; // they point to each other
  EngineParts& operator=(const EngineParts&) = delete;

  UnitId num_units() const {
    return static_cast<UnitId>(units.size());
  }
  // See DiskStates. Before anything is materialized, where something is on disk.
  void open_disk(const DiskFolder& place);
  // See HostStates. The same, where something is on the host.
  void map_host_memory();
  // See Moments. None where there is no place for them either.
  std::vector<at::Tensor> make_moments(UnitId unit, int param);
  // In the child of a fork: from now on every use of units is an error, where there are peers.
  void mark_forked();
  // Bytes on the host and on disk, but those of the optimizer.
  HostBytes host_bytes() const;

  EngineOptions options;
  HandOverLog hand_overs;
  Streams streams;
  BucketPool pool;
  Trace trace;
  ModelAlarm alarm;
  GroupCollectives groups;
  std::unique_ptr<ControlChannel> control;
  std::unique_ptr<HostLink> host_link; // emulated; null for none
  std::unique_ptr<HostStates> host; // null where nothing is on the host
  std::unique_ptr<DiskStates> disk; // null where nothing is on disk
  UnitContext context;
  std::vector<bool> stays; // by unit: as it was made
  std::vector<std::unique_ptr<Unit>> units;
  std::optional<Moments> moments; // none where there is no place for them
  Offload offload;
  Schedule schedule;
  Reducer reducer;
  std::unique_ptr<Registrar> registrar;
  ThreadCheck thread_check;
  Actions actions; // reused
  bool sync = true; // reductions communicate
  bool backward = false; // one that goes through the model is under way

 private:
  void expect_step();
};

} // namespace zerocore
