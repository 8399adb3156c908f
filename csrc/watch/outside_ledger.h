// Counts the collectives of the package that no engine issues, such as the all-reduce of a norm.
//
// Note [Outside collectives]
// A program may call a function that communicates on one rank only, such as a histogram of a
// gradient on rank 0. The other ranks then issue another collective on the same group. On gloo,
// different collectives must not meet, and equal ones would exchange the wrong numbers, so the
// group's guard compares these collectives, too (see Note [Known sequences]). On all backends the
// counts of such collectives help to prove that ranks wait for each other.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "watch/ledger.h"

namespace zerocore {

// Returns a name of the group that is equal on its ranks and that no group of other ranks has. If a
// backend does not list its ranks, each rank returns a different name.
std::string unique_name(c10d::ProcessGroup& group);

// The counts of a process. They outlive the models, because ranks free a model at different times.
class OutsideLedger {
 public:
  static OutsideLedger& of_process();

  // Records that this thread is about to issue a collective on the group, and waits. `what` must be
  // equal on all ranks that issue it. If the group is gloo's and an engine uses it, compares `what`
  // with the other ranks, unless it is empty. Throws c10::DistBackendError if they differ. Ignores
  // groups that c10d does not know by name.
  void begin(const std::string& group, const std::string& what);
  // Records that the wait of the last collective on the group is over.
  void end(const std::string& group);
  // Returns this rank's position on each group.
  std::vector<GroupPosition> positions() const;

 private:
  struct Entry {
    // A later group may have the same name.
    std::optional<c10::weak_intrusive_ptr<c10d::ProcessGroup>> group;
    GroupPosition position;
  };

  mutable std::mutex mutex_;
  std::map<std::string, Entry> entries_; // by the group's name in c10d
};

} // namespace zerocore
