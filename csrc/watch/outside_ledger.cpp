// Counts collectives by group, and has them compared.
#include "watch/outside_ledger.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <functional>
#include <utility>

#include "common/math.h"
#include "watch/control_link.h"

namespace zerocore {

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Returns the group, or null if its library has not registered it with c10d.
Group find_group(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    return {};
  }
}

// Returns the link of the group's gloo backend; null for other backends, and without an engine.
std::shared_ptr<ControlLink> link_of(c10d::ProcessGroup& group) {
  for (const c10::Device device : group.getDeviceTypes()) {
    try {
      const auto backend = group.getBackend(device.type());
      if (backend->getBackendName() == "gloo") {
        return ControlLink::find(*backend);
      }
    } catch (const std::exception&) { // a group of another library has no backends
    }
  }
  return nullptr;
}

} // namespace

std::string unique_name(c10d::ProcessGroup& group) {
  uint64_t ranks = 0; // groups of different ranks may have one name in c10d
  for (const c10::Device device : group.getDeviceTypes()) {
    try {
      const auto options = group.getBackend(device.type())->getBackendOptions();
      if (options != nullptr) { // a simulated group has none
        for (const uint64_t rank : options->global_ranks_in_group) {
          ranks = mix(ranks, rank);
        }
        continue;
      }
    } catch (const std::exception&) { // the backend does not list its ranks
    }
    ranks = mix(ranks, static_cast<uint64_t>(group.getRank()) + 1);
  }
  return group.getGroupName() + " " + std::to_string(ranks);
}

// Never destroyed: the watchdog's threads may outlive all other objects of the process.
OutsideLedger& OutsideLedger::of_process() {
  static auto& ledger = *new OutsideLedger();
  return ledger;
}

void OutsideLedger::begin(const std::string& name, const std::string& what) {
  const Group group = find_group(name);
  if (group == nullptr) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[name];
    if (!entry.group.has_value() || entry.group->lock() != group) {
      entry.group.emplace(group);
      entry.position = {};
      entry.position.name = "outside " + unique_name(*group);
    }
    entry.position.waiting = entry.position.next++;
    entry.position.thread = this_thread();
    entry.position.what = what;
  }
  const auto link = what.empty() ? nullptr : link_of(*group);
  if (link != nullptr) {
    const uint64_t collective = std::hash<std::string>()(what);
    if (link->guard().must_compare(collective)) {
      link->guard().compare(collective);
    }
  }
}

void OutsideLedger::end(const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (const auto found = entries_.find(name); found != entries_.end()) {
    found->second.position.waiting = -1;
  }
}

std::vector<GroupPosition> OutsideLedger::positions() const {
  const std::lock_guard lock(mutex_);
  std::vector<GroupPosition> positions;
  for (const auto& [name, entry] : entries_) {
    positions.push_back(entry.position);
  }
  return positions;
}

} // namespace zerocore
