// Lets ranks that take different ways through a model issue one sequence of collectives.
//
// See Note [One order on every rank] in plan/schedule.h, and comm/control_channel.h for the
// messages.
#pragma once

#include <optional>
#include <vector>

#include "engine/unit_lifecycle.h"

namespace zerocore {

// Sizes of all that is kept of what ranks agree on, for tests: none of it grows for ever.
struct Agreed {
  size_t num_calls = 0; // in the order of a pass
  size_t num_shapes = 0; // of backwards
  size_t num_points = 0; // see Note [Known sequences]; of all groups
  uint64_t num_compared = 0; // collectives that ranks compared before they issued them
  uint64_t num_messages = 0; // others that this rank has sent
};

class OrderConsensus {
 public:
  // All outlive it.
  OrderConsensus(
      const Units& units,
      const UnitContext& context,
      Schedule& schedule,
      UnitLifecycle& lifecycle)
      : units_(units), context_(context), schedule_(schedule), lifecycle_(lifecycle) {}

  // This rank gathers units again, behind a step or for the pass that begins, as their weights have
  // changed since. Where ranks differ in this, their next collectives do not match.
  void note_gathers(const std::vector<UnitId>& again);
  // A call of the unit begins, or the backward of a call. If the order has it not, this rank serves
  // the others until all of them gather the unit.
  void ask_in_forward(UnitId unit);
  void ask_in_backward(const CallHandle& call);
  // Before a backward goes on in the pass: its ranks go from pass to pass together.
  void go_to_pass(int64_t pass);
  // At the end of a backward, or of its part in a pass, in which other ranks may have asked.
  void serve_others();
  // The others hear of it while this rank goes on to its loss, unless there is much to say.
  void leave_pass();
  // This rank's call has raised. The pass's collectives are issued to the end, and the others hear
  // of it, so that all ranks drop the pass.
  void fail_pass();
  // Before the next collective of this rank: the others may need units that it did not call.
  void finish_pass();
  // Does without the others' answer to the pass that was left: they free their model, too.
  void abandon_pass() {
    leaving_ = false;
  }

  // The ranks took different ways in passes since the last backward.
  bool ranks_differ() const {
    return ranks_differ_;
  }
  void end_backward() {
    ranks_differ_ = false;
  }
  // A rank whose forward has raised in this pass.
  std::optional<int> failed() const {
    return failed_;
  }
  // As finish_pass, and forgets that a rank has failed.
  void reset() {
    finish_pass();
    failed_.reset();
  }

  // `num_backward_shapes`: see ModelCalls.
  Agreed agreed(size_t num_backward_shapes) const;

 private:
  // Whether no other rank asks what this one does in the pass.
  bool is_alone() const;
  void ask_for(UnitId unit);
  void say(ControlChannel::Answer own) const;
  ControlChannel::Answer wait();
  // See Schedule::finish_pass.
  void conclude_pass(bool agreed, const std::vector<bool>& needs, bool reads_all);
  // Throws what the ranks have written in place if it differs.
  void compare_writes(bool differ);
  // Gathers a unit that other ranks need.
  void serve(UnitId unit, bool in_pass);

  const Units& units_;
  const UnitContext& context_;
  Schedule& schedule_;
  UnitLifecycle& lifecycle_;
  bool leaving_ = false; // a pass that other ranks may still be in
  bool ranks_differ_ = false;
  bool calls_differ_ = false; // those of the ranks in the pass that was finished last
  int64_t written_ = 0; // in place, up to the end of the pass; see Note [Writes that differ]
  uint64_t gathered_ = 0; // again, since the ranks last compared it; see note_gathers()
  UnitId first_gathered_ = -1;
  std::optional<int> failed_;
};

} // namespace zerocore
