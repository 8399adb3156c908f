// The order in which all ranks go through the calls of a pass, and this rank's own calls in it.
//
// See Note [One order on every rank] in plan/schedule.h.
//
// A call is one entry of a unit. All ranks number the calls of a pass alike, whether they make them
// or not; each makes some of them, in the order of their numbers. When a call was left is told by
// the last call that was entered before.
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

// -- the order, and this rank's own calls in it
// ----------------------------------------------------

class CallOrder {
 public:
  explicit CallOrder(std::vector<CallEvent> events);

  const std::vector<CallEvent>& events() const {
    return events_;
  }
  // Number of calls in the order, and of the pass under way.
  size_t num_calls() const {
    return calls_.size();
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
  // Every rank adds a call that one rank adds: true where units are gathered.
  void set_shared(bool shared, size_t num_units) {
    shared_ = shared;
    num_units_ = num_units;
  }
  // A call behind all others; returns its number.
  int32_t add(UnitId unit);
  // Calls that this rank has left later than all ranks know.
  std::vector<bool> late() const;
  // Any rank is in these calls as the next one is added, or has left them late(): all ranks take
  // them to be left behind that one.
  void extend(const std::vector<bool>& calls);
  // This rank makes the call.
  void enter(int32_t call);
  void leave(int32_t call, bool needs_backward);
  // Whether the backward of the call reads parameters, as all ranks expect it.
  bool reads(int32_t call) const {
    return calls_.at(call).reads;
  }

  // -- its end
  // Whether this rank's calls are other ones than the order has, or the order is that of
  // registration.
  bool changed() const {
    return changed_;
  }
  // Whether this rank left out calls.
  bool skipped() const;
  // A hash of the calls that this rank has made and of which of them need a backward.
  uint64_t hash() const;
  // By call, whether this rank needs its backward, or may have to. Behind them, where calls are not
  // shared, by unit whether it does for a call of the unit that it has added.
  std::vector<bool> needs() const;
  // All ranks have made this rank's calls: they are the order of the next pass. Returns the events
  // of this one.
  std::vector<CallEvent> take_own();
  // Ranks have made different calls, and any of them has these needs(): the order stays.
  std::vector<CallEvent> unite(const std::vector<bool>& needs);

 private:
  struct Call {
    UnitId unit = -1;
    int32_t last = -1; // number of the last call that was made before this one was left
    int32_t last_of_all = -1; // the same, as all ranks know it
    bool needs_backward = true;
    bool made = false; // by this rank
    bool reads = true;
  };

  static std::vector<CallEvent> events_of(const std::vector<Call>& calls);
  void take(std::vector<CallEvent> events);

  std::vector<CallEvent> events_;
  std::vector<Call> expected_; // the same as calls
  bool learned_ = false; // from a pass; else the order is that of registration
  bool shared_ = true;
  size_t num_units_ = 0;
  // Of the pass under way.
  std::vector<Call> calls_;
  size_t cursor_ = 0;
  int32_t last_made_ = -1;
  bool grad_ = false;
  bool changed_ = false;
};

} // namespace zerocore
