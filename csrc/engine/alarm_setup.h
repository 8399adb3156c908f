// Makes the alarm of a model.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/engine_options.h"
#include "engine/unit/unit.h"

namespace zerocore {

class Alarm;

// Looks after the collectives of the model's groups. There is no alarm inside if `stall_seconds` is
// 0 or there is no `alarm_name`, as without real peers.
class ModelAlarm {
 public:
  ModelAlarm(const EngineOptions& options, const std::vector<UnitSpec>& units);
  ModelAlarm(const ModelAlarm&) = delete;
  ModelAlarm& operator=(const ModelAlarm&) = delete;

  Alarm* get() const {
    return alarm_.get();
  }
  bool is_raised() const;
  // See Alarm::check(); without an alarm, nothing.
  void check() const;
  // For the ranks' comparison: whether the parameters from `first` on require grad here.
  void set_trainable(size_t first, const std::vector<bool>& flags) const;
  // Before units are destroyed: the watchdog forgets their names.
  void retire();

 private:
  std::shared_ptr<Alarm> alarm_;
};

} // namespace zerocore
