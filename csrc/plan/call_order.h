// The order in which all ranks go through the calls of a pass, and this rank's own calls in it. See
// Note [One order on every rank] in plan/schedule.h.
//
// A call is one entry of a unit. All ranks number the calls of a pass alike, whether they make them
// or not; each rank makes some of them, in the order of their numbers. A call's end is recorded as
// the number of the last call that was entered before it ended.
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

  // Returns the enters and exits of the order, as a forward makes them.
  const Instructions& events() const {
    return program_.list();
  }
  Program& program() {
    return program_;
  }
  // Returns the number of calls of the running pass.
  size_t num_calls() const {
    return calls_.size();
  }

  // -- in a pass
  void begin(bool grad);
  // Returns the next call of the unit in the rest of the order.
  std::optional<int32_t> find(UnitId unit) const;
  // `shared` says that all ranks add the calls that any rank adds, as they must to gather units.
  void set_shared(bool shared, size_t num_units) {
    shared_ = shared;
    num_units_ = num_units;
  }
  // Adds a call after all others; returns its number.
  int32_t add(UnitId unit);
  // Returns by call whether this rank has left it later than the other ranks know.
  std::vector<bool> late() const;
  // Takes the calls that any rank is still in, or has left late, when the next call is added. All
  // ranks count them as left after that call.
  void extend(const std::vector<bool>& calls);
  // This rank enters and leaves a call.
  void enter(int32_t call);
  void leave(int32_t call, bool needs_backward);
  // Returns whether all ranks expect the backward of the call to read parameters.
  bool reads(int32_t call) const {
    return calls_.at(call).reads;
  }

  // -- at its end
  // Returns whether this rank's calls differ from the order, or the order was not learned yet.
  bool changed() const {
    return changed_;
  }
  // Returns whether this rank did not make all calls.
  bool skipped() const;
  // Returns a hash of the calls that this rank has made, and of those that need a backward.
  uint64_t hash() const;
  // Returns by call whether this rank needs, or may need, its backward. If calls are not shared, a
  // flag by unit follows: whether this rank needs the backward of a call that it has added.
  std::vector<bool> needs() const;
  // If all ranks have made the same calls: makes them the order of the next pass. Returns the
  // events of this pass.
  Instructions take_own();
  // If they have not: keeps the order, and returns the events of this pass. `needs` unites the
  // needs() of all ranks.
  Instructions unite(const std::vector<bool>& needs);

 private:
  struct Call {
    UnitId unit = -1;
    int32_t last = -1; // number of the last call that was entered before this one was left
    int32_t last_of_all = -1; // the same, as all ranks know it
    bool needs_backward = true;
    bool made = false; // by this rank
    bool reads = true;
  };

  static Instructions events_of(const std::vector<Call>& calls);
  void take(Instructions events);

  Program program_;
  std::vector<Call> expected_; // the calls of the order
  bool learned_ = false; // learned from a pass, not the order in which modules were registered
  bool shared_ = true;
  size_t num_units_ = 0;
  // The running pass:
  std::vector<Call> calls_;
  int32_t last_made_ = -1;
  bool grad_ = false;
  bool changed_ = false;
};

} // namespace zerocore
