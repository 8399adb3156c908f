// Makes ranks that take different paths through a model issue the same sequence of collectives.
//
// See Note [One order on every rank] in plan/schedule.h, and comm/control_channel.h for the
// messages.
#pragma once

#include <optional>
#include <vector>

#include "engine/unit_lifecycle.h"

namespace zerocore {

// Sizes of the state that ranks agree on. Tests check that they are bounded.
struct Agreed {
  size_t num_calls = 0; // in the order of calls
  size_t num_shapes = 0; // of backward passes; see ModelCalls
  size_t num_points = 0; // see Note [Known sequences]; summed over all groups
  uint64_t num_compared = 0; // collectives that ranks compared before they issued them
  uint64_t num_messages = 0; // messages that this rank has sent over the control channel
};

// This rank's side of the messages with which ranks agree on one order of collectives.
class OrderConsensus {
 public:
  // All arguments must outlive the object.
  OrderConsensus(
      const Units& units,
      const UnitContext& context,
      Schedule& schedule,
      UnitLifecycle& lifecycle)
      : units_(units), context_(context), schedule_(schedule), lifecycle_(lifecycle) {}

  // Records that this rank gathers units again because their weights have changed. At the end of
  // the pass the ranks compare these units: if they differ, the collectives no longer match.
  void note_gathers(const std::vector<UnitId>& again);
  // At the begin of a call of the unit, or of its backward: if the call is not in the order, asks
  // for the unit, and serves the other ranks until all of them gather it.
  void ask_in_forward(UnitId unit);
  void ask_in_backward(const CallHandle& call);
  // Before a backward continues in another pass: serves ranks that still ask in the last one, so
  // that all ranks go from pass to pass together.
  void go_to_pass(int64_t pass);
  // Serves the ranks that ask for units, until all have ended the backward, or its part in a pass.
  void serve_others();
  // Sends this rank's calls to the others. Does not wait for their answers while the ranks make the
  // same calls, so that this rank can compute its loss.
  void leave_pass();
  // After an exception in this rank's call: issues the pass's remaining collectives and tells the
  // others, so that all ranks drop the pass.
  void fail_pass();
  // Must precede this rank's next collective: waits for the others' messages, serves them, and
  // concludes the pass that this rank has left.
  void finish_pass();
  // Stops waiting for the others to leave the pass: they free their model, too.
  void abandon_pass() {
    leaving_ = false;
  }

  // Returns whether ranks have made different calls in a pass since the last backward.
  bool ranks_differ() const {
    return ranks_differ_;
  }
  void end_backward() {
    ranks_differ_ = false;
  }
  // Returns a rank whose forward raised in this pass.
  std::optional<int> failed() const {
    return failed_;
  }
  // Finishes the pass, and forgets the failed rank.
  void reset() {
    finish_pass();
    failed_.reset();
  }

  // `num_backward_shapes`: see ModelCalls.
  Agreed agreed(size_t num_backward_shapes) const;

 private:
  // Returns whether this rank exchanges no messages in the pass: it is the only rank, or the pass
  // does not follow the order.
  bool is_alone() const;
  void ask_for(UnitId unit);
  void say(ControlChannel::Answer own) const;
  ControlChannel::Answer wait();
  // Finishes the pass in the schedule, see Schedule::finish_pass for the arguments.
  void conclude_pass(bool agreed, const std::vector<bool>& needs, bool reads_all);
  // Throws c10::ValueError if ranks have written different values in place.
  void compare_writes(bool differ);
  // Gathers and reshards a unit that another rank needs.
  void serve(UnitId unit, bool in_pass);

  const Units& units_;
  const UnitContext& context_;
  Schedule& schedule_;
  UnitLifecycle& lifecycle_;
  bool leaving_ = false; // this rank has left a pass that others may still be in
  bool ranks_differ_ = false;
  bool calls_differ_ = false; // the ranks' calls differed in the last finished pass
  int64_t written_ = 0; // checksum of writes in place; see Note [Writes that differ]
  uint64_t gathered_ = 0; // hash of note_gathers() since the ranks last compared it
  UnitId first_gathered_ = -1;
  std::optional<int> failed_;
};

} // namespace zerocore
