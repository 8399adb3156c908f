// The calls of one forward pass, and how the lists of several ranks become one.
//
// A call is one entry of a unit. All ranks number the calls of a pass alike, whether they make them
// or not; each makes some of them, in the order of their numbers. When a call was left is told by
// the last call that was entered before.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/backward_steps.h"

namespace zerocore {

struct PassCall {
  UnitId unit = -1;
  int32_t last = -1; // number of the last call that the rank made before it left this one
  bool needs_backward = true;
  bool made = false; // by the rank, or by any
  bool reads = true; // its backward, the unit's parameters; as all ranks expect it
};

using PassCalls = std::vector<PassCall>;

// Numbers the calls of `events` (field `call`) by their enters.
void number_calls(std::vector<CallEvent>& events);
PassCalls calls_of(const std::vector<CallEvent>& events);
// A call is left as soon as it may be: right after the enter of its last one.
std::vector<CallEvent> events_of(const PassCalls& calls);

// One list that holds for all ranks: a call is left when every rank that made it has left it, and
// needs a backward if it does on any of them. Calls that nobody made are
// as in the first list.
PassCalls unite(const std::vector<PassCalls>& ranks);

// The calls that ranks expect of the next pass.
struct NextCalls {
  PassCalls calls;
  std::vector<int32_t> places; // of the first rank's calls among them; -1 for those not made
};

// The shortest list, within reach of merging pairs, that has each rank's calls in its own order.
// Calls that nobody made stay where they are if `keeps_unmade` and nobody called the unit
// elsewhere.
NextCalls merge(const std::vector<PassCalls>& ranks, int own, bool keeps_unmade);

} // namespace zerocore
