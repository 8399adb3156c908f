// The parts that all units of a rank share; members are made in order and freed in reverse.
#pragma once

#include <memory>
#include <vector>

#include "engine/alarm_setup.h"
#include "engine/engine_options.h"
#include "engine/unit/disk_states.h"
#include "engine/unit/host_states.h"
#include "engine/unit/unit.h"
#include "plan/schedule_options.h"

namespace zerocore {

class Resources {
 public:
  // The pool expects a step of the units in `order`, see BucketPool::expect.
  Resources(
      const EngineOptions& options,
      c10::Device device,
      const std::vector<UnitSpec>& units,
      const std::vector<CallEvent>& order);
  Resources(const Resources&) = delete; // the context points to its members
  Resources& operator=(const Resources&) = delete;

  const UnitContext& context() const {
    return context_;
  }
  ModelAlarm& alarm() {
    return alarm_;
  }
  const HandOverLog& hand_overs() const {
    return hand_overs_;
  }
  // Null with one rank.
  Collectives* group_of(AxisName axis) const;

 private:
  void make_context(const ShardOptions& sharding);

  HandOverLog hand_overs_;
  Streams streams_;
  BucketPool pool_;
  Trace trace_;
  ModelAlarm alarm_;
  std::unique_ptr<Collectives> shard_, replicas_, near_; // each null if the model has no such group
  std::unique_ptr<ControlChannel> control_;
  std::unique_ptr<HostLink> host_link_; // emulated, or null
  std::unique_ptr<HostStates> host_; // null if no state is on the host
  std::unique_ptr<DiskStates> disk_; // null if no state is on disk
  UnitContext context_;
};

} // namespace zerocore
