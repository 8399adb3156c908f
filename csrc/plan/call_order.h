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
#include "plan/program.h"

namespace zerocore {

class CallOrder {
 public:
  explicit CallOrder(Instructions events);

  // The order, of a pass as its forward.
  const Instructions& events() const {
    return program_.list();
  }
  Program& program() {
    return program_;
  }
  // Number of calls of the pass under way.
  size_t num_calls() const {
    return calls_.size();
  }

  // -- a pass
  void begin(bool grad);
  // The next call of the unit in what is left of the order; none if there is none.
  std::optional<int32_t> find(UnitId unit) const;
  // Whether all ranks add the calls that any of them adds, which is so where units are gathered.
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
  Instructions take_own();
  // Ranks have made different calls, and any of them has these needs(): the order stays.
  Instructions unite(const std::vector<bool>& needs);

 private:
  struct Call {
    UnitId unit = -1;
    int32_t last = -1; // number of the last call that was made before this one was left
    int32_t last_of_all = -1; // the same, as all ranks know it
    bool needs_backward = true;
    bool made = false; // by this rank
    bool reads = true;
  };

  static Instructions events_of(const std::vector<Call>& calls);
  void take(Instructions events);

  Program program_;
  std::vector<Call> expected_; // the same as calls
  bool learned_ = false; // from a pass; else the order is that of registration
  bool shared_ = true;
  size_t num_units_ = 0;
  // Of the pass under way.
  std::vector<Call> calls_;
  int32_t last_made_ = -1;
  bool grad_ = false;
  bool changed_ = false;
};

} // namespace zerocore
