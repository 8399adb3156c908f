// The order in which all ranks go through the calls of a pass, and how the lists of several ranks
// become one.
//
// See Note [One order on every rank] in plan/schedule.h.
//
// A call is one entry of a unit. All ranks number the calls of a pass alike, whether they make them
// or not; each makes some of them, in the order of their numbers. When a call was left is told by
// the last call that was entered before.
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

#include "common/types.h"

namespace zerocore {

// -- the calls of one forward pass, and the ordered steps of its backward that they turn into
// ------
//
// The list is the same on every rank, whichever of the calls it made, and every collective of the
// backward is a position in it. A rank that finds a later step due first does all steps before it,
// so no rank waits for a collective that another one leaves out.

enum class EventKind : uint8_t { Enter, Exit };

// A unit entered or left in a forward pass.
struct CallEvent {
  EventKind kind = EventKind::Enter;
  UnitId unit = -1;
  bool needs_backward = true; // of an Exit: its outputs require grad
  int32_t call = -1; // number of the call in its pass
  bool reads = true; // of an Exit: the call's backward reads the unit's parameters
  bool alone = false; // of an Exit: a read outside of calls, which a rank may do alone

  bool is_enter(UnitId of) const {
    return kind == EventKind::Enter && unit == of;
  }
};

enum class BackwardStepKind : uint8_t {
  Pre, // the backward of a call is about to run
  Gather, // the unit must be (on its way to be) unsharded
  Release, // the unit is not needed any more, and other calls of it follow or nothing is reduced
  Reduce, // the unit's gradients are complete: reduce them and release the unit
};

struct BackwardStep {
  BackwardStepKind kind = BackwardStepKind::Pre;
  UnitId unit = -1;
  int32_t call = -1; // whose backward begins or ends; not of a Gather
  bool reads = true; // of a Pre: the unit must be unsharded

  bool is_pre(int32_t of) const {
    return kind == BackwardStepKind::Pre && call == of;
  }
};

// -- how the lists of several ranks become one
// ------------------------------------------------------

struct PassCall {
  UnitId unit = -1;
  // Number of the last call that the rank made before it left this one; -1 of a slot for a call
  // that the rank did not make, see Note [Slots].
  int32_t last = -1;
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

// -- the order, and this rank's own calls in it
// ----------------------------------------------------

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
