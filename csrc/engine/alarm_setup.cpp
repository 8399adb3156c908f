// Makes the alarm of a model.
#include "engine/alarm_setup.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "watch/alarm.h"
#include "watch/watchdog.h"

namespace zerocore {

namespace {

std::vector<std::string> names_of(const std::vector<UnitSpec>& units) {
  std::vector<std::string> names;
  for (const UnitSpec& unit : units) {
    for (const UnitParam& param : unit.params) {
      names.push_back(param.spec.fqn);
    }
  }
  return names;
}

} // namespace

ModelAlarm::ModelAlarm(const EngineOptions& engine, const std::vector<UnitSpec>& units) {
  if (engine.alarm_name.empty() || engine.stall_seconds == 0) {
    return;
  }
  AlarmOptions options{engine.alarm_name, 0, 1, engine.stall_seconds};
  std::vector<Alarm::Group> groups;
  if (engine.control) {
    const auto all = c10d::resolve_process_group(*engine.control);
    options.rank = all->getRank();
    options.size = all->getSize();
  }
  std::vector<std::optional<std::string>> names = {engine.control};
  for (const GroupNames& mesh : engine.meshes) {
    names.insert(names.end(), {mesh.shard, mesh.replicas, mesh.reductions, mesh.near});
  }
  for (const auto& each : names) {
    if (each) {
      groups.push_back(c10d::resolve_process_group(*each));
    }
  }
  if (!groups.empty()) {
    alarm_ = std::make_shared<Alarm>(options, groups, names_of(units));
    Watchdog::of_process().add(alarm_);
  }
}

bool ModelAlarm::is_raised() const {
  return alarm_ != nullptr && alarm_->is_raised();
}

void ModelAlarm::check() const {
  if (alarm_ != nullptr) {
    alarm_->check();
  }
}

void ModelAlarm::set_trainable(size_t first, const std::vector<bool>& flags) const {
  if (alarm_ != nullptr) {
    alarm_->ledger().set_trainable(first, flags);
  }
}

void ModelAlarm::retire() {
  if (alarm_ != nullptr && Watchdog::of_process().remove(alarm_.get())) {
    alarm_->ledger().forget();
  }
}

} // namespace zerocore
