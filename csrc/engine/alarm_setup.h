// Makes the alarm of a model.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/unit.h"

namespace zerocore {

class Alarm;

struct UnitInit {
  std::string name;
  std::vector<UnitParam> params;
};

// Looks after the collectives of both groups (names of c10d groups). There is no alarm inside if
// `stall_seconds` is 0 or there is no `name`, as without real peers.
class ModelAlarm {
 public:
  ModelAlarm(
      const std::string& name,
      double stall_seconds,
      const std::optional<std::string>& group,
      const std::optional<std::string>& replicas,
      const std::optional<std::string>& control,
      c10::Device device,
      const std::vector<UnitInit>& units);
  ModelAlarm(const ModelAlarm&) = delete;
  ModelAlarm& operator=(const ModelAlarm&) = delete;

  Alarm* get() const {
    return alarm_.get();
  }
  bool is_raised() const;
  // See Alarm::check() and Alarm::fail(); without an alarm, nothing and a plain error.
  void check() const;
  [[noreturn]] void fail(const std::string& what) const;
  // For the ranks' comparison: whether the parameters from `first` on require grad here.
  void set_trainable(size_t first, const std::vector<bool>& flags) const;
  // Before units are destroyed: the watchdog forgets their names.
  void retire();

 private:
  std::shared_ptr<Alarm> alarm_;
};

} // namespace zerocore
