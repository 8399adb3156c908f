// The order of calls in a pass, which all ranks share, and the calls that this rank makes. See Note
// [One order on every rank] in plan/schedule.h.
//
// A call is one entry of a unit. All ranks number the calls of a pass alike, even calls that they
// do not make. Each rank makes its calls in the order of their numbers. A call's end is stored as
// the number of the last call that was entered before it.
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
  // Returns the unit's next call in the rest of the order.
  std::optional<int32_t> find(UnitId unit) const;
  // `shared`: all ranks add the calls that any rank adds, as they must to gather units.
  void set_shared(bool shared, size_t num_units) {
    shared_ = shared;
    num_units_ = num_units;
  }
  // Adds a call after all others; returns its number.
  int32_t add(UnitId unit);
  // Returns by call whether this rank exited it later than the other ranks know.
  std::vector<bool> late() const;
  // Takes the calls that are open or late on any rank when the next call is added. All ranks count
  // them as ending after that call is entered.
  void extend(const std::vector<bool>& calls);
  // Records that this rank enters or exits a call.
  void enter(int32_t call);
  void exit(int32_t call, bool needs_backward);
  // Returns whether all ranks expect the backward of the call to read parameters.
  bool reads(int32_t call) const {
    return calls_.at(call).reads;
  }

  // -- at its end
  // Returns whether this rank's calls differ from the order, or the order was not learned yet.
  bool changed() const {
    return changed_;
  }
  // Returns whether the pass has calls that this rank did not make.
  bool skipped() const;
  // Returns a hash of this rank's calls, and of which of them need a backward.
  uint64_t hash() const;
  // Returns by call whether this rank needs, or may need, its backward. If calls are not shared, a
  // flag for each unit follows: this rank needs the backward of a call of the unit that it added.
  std::vector<bool> needs() const;
  // For ranks that made the same calls: makes these calls the order of the next pass. Returns the
  // events of this pass.
  Instructions take_own();
  // For ranks that made different calls: keeps the order, and returns the events of this pass.
  // `needs` is the union of all ranks' needs().
  Instructions unite(const std::vector<bool>& needs);

 private:
  struct Call {
    UnitId unit = -1;
    int32_t last = -1; // number of the last call that was entered before this one ended
    int32_t last_of_all = -1; // the value of `last` that all ranks know
    bool needs_backward = true;
    bool made = false; // this rank made the call
    bool reads = true;
  };

  static Instructions events_of(const std::vector<Call>& calls);
  void take(Instructions events);

  Program program_;
  std::vector<Call> expected_; // the calls of the order
  bool learned_ = false; // the order comes from a pass, not from the registration of modules
  bool shared_ = true;
  size_t num_units_ = 0;
  // The running pass:
  std::vector<Call> calls_;
  int32_t last_made_ = -1;
  bool grad_ = false;
  bool changed_ = false;
};

} // namespace zerocore
