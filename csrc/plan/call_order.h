// The order in which all ranks go through the calls of a pass, and this rank's own calls in it.
//
// See Note [One order on every rank] in plan/schedule.h.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "plan/pass_calls.h"

namespace zerocore {

class CallOrder {
 public:
  explicit CallOrder(std::vector<CallEvent> events);

  const std::vector<CallEvent>& events() const {
    return events_;
  }

  // -- a pass
  void begin(bool grad);
  // The event that comes next; null at the end.
  const CallEvent* next() const {
    return cursor_ < events_.size() ? &events_[cursor_] : nullptr;
  }
  void advance() {
    ++cursor_;
  }
  // The next call of the unit in what is left of the order; none if there is none.
  std::optional<int32_t> find(UnitId unit) const;
  // The next `count` different units that the order enters.
  std::vector<UnitId> upcoming(int count) const;
  // A call behind all others; returns its number.
  int32_t add(UnitId unit);
  // This rank makes the call.
  void enter(int32_t call);
  void leave(int32_t call, bool needs_backward);

  // -- its end
  // Whether the ranks have to compare what they did.
  bool changed() const {
    return changed_;
  }
  // Whether this rank left out calls.
  bool skipped() const;
  // As this rank made them.
  const PassCalls& calls() const {
    return calls_;
  }
  // Learns from the calls of all ranks what to expect of the next pass. Returns the events of this
  // one. `own` is this rank's index.
  std::vector<CallEvent> learn(const std::vector<PassCalls>& ranks, int own);

 private:
  void take(std::vector<CallEvent> events);

  std::vector<CallEvent> events_;
  PassCalls expected_; // the same as calls
  std::vector<uint8_t> own_needs_; // in a backward, of this rank's calls, when last compared
  bool learned_ = false; // from a pass; else the order is that of registration
  // Of the pass under way.
  PassCalls calls_;
  size_t cursor_ = 0;
  int32_t last_made_ = -1;
  bool grad_ = false;
  bool changed_ = false;
};

} // namespace zerocore
