// The order in which all ranks go through the calls of a pass, and this rank's own calls in it.
//
// See Note [One order on every rank] in plan/schedule.h.
//
// Note [Slots]
// Where no unit is gathered (stage 0), a rank that makes calls which are not in the order asks
// nobody. Its k-th such call of unit u gets the number n + k U + u, behind n expected calls and
// with U units, so ranks number alike what they do not know of each other. They compare these
// numbers at the end of the pass.
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
  // From now on calls behind the order have slots; `num_units` is 0 where all ranks add them.
  void use_slots(size_t num_units) {
    num_units_ = num_units;
  }
  // A call behind all others; returns its number.
  int32_t add(UnitId unit);
  // Calls that this rank has added to slots; slots for as many as any rank has.
  int64_t num_added() const {
    return num_units_ == 0 ? 0
                           : static_cast<int64_t>((calls_.size() - expected_.size()) / num_units_);
  }
  void make_slots(int64_t num_added);
  size_t num_slots() const {
    return num_units_ == 0 ? 0 : calls_.size() - expected_.size();
  }
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
  size_t num_units_ = 0;
  size_t cursor_ = 0;
  int32_t last_made_ = -1;
  bool grad_ = false;
  bool changed_ = false;
};

} // namespace zerocore
