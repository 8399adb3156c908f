// Decides when a unit is unsharded, resharded and reduced; integers only.
//
// The engine reports events (enter, exit, pre-backward, gradients ready) and carries out the
// returned actions in order. The planner drives the same object with the expected events, so it
// predicts exactly the actions of the runtime.
//
// Note [One order on every rank]
// All ranks must issue collectives in one order, even if they take different paths. So a root
// forward (one call of the sharded model) follows an order of calls that is the same on all ranks.
// When a rank makes a call, it finds the call in the rest of the order, and unshards and reshards
// the units of the calls that it skips. A call that is not in the order is added at the end: the
// rank runs the rest of the order and then asks the others. They serve the call when they reach the
// end of the order: they unshard and reshard the unit without using it. So all ranks know all calls
// of the pass. When ranks leave the pass they compare hashes of the calls that each has made. If
// the hashes agree, these calls become the order of the next pass; otherwise the order stays. The
// first order is the order in which modules were registered. The backward of a pass goes through
// the calls of the order and the added ones, as far as any rank needs their backward.
//
// Note [Gathers that no rank reads]
// The backward of an embedding lookup reads indices and no weight, so an all-gather for it would be
// wasted. The classes of modules, equal on all ranks, tell which calls of the order are lookups.
// Hooks, or another module that shares the weight, may still read the weight. If any rank reports
// this when it leaves the pass, all calls of this pass count as reading.
//
// Note [Passes whose backward never comes]
// If several passes use a unit, the backward of the first pass reduces it. So one backward through
// all of them reduces the unit once, at the end. The backward of a pass may never come, because its
// output was detached. When a backward ends, it therefore reduces all units that are still due.
// This depends on the calls alone, never on this rank's gradients: another rank may have other
// gradients. After such an end, later backwards reduce pass by pass.
//
// Note [Recomputed calls]
// An activation checkpoint repeats its calls in the order of the forward, and then goes backward
// through them. Only the last of these calls is next in the backward's program, and advances it.
// The earlier calls are unsharded out of turn; the backward of each begins when autograd reaches
// its output. So no instruction of a call is carried out before autograd reaches the call.
//
// Calls outside of a root forward are unsharded on demand, without prefetch, and all ranks must
// make them. The same holds for a pass without gradients in which all units are unsharded already.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "plan/call_order.h"
#include "plan/forward_passes.h"
#include "plan/program.h"
#include "plan/residency.h"
#include "plan/shard_options.h"
#include "plan/unit_mesh.h"

namespace zerocore {

// The position of a backward: it is past all calls of the pass from number `end` on.
struct BackwardPosition {
  int64_t pass = -1; // -1 if unknown
  int32_t end = 0;
};

// The schedule of one model: its order of calls, its programs, and which units are unsharded.
class Schedule {
 public:
  // `meshes` is by unit. `order` has the expected enters and exits of a root forward.
  Schedule(const std::vector<UnitMesh>& meshes, const ShardOptions& sharding, Instructions order)
      : prefetch_(sharding.prefetch),
        retain_last_(sharding.retain_last),
        order_(std::move(order)),
        passes_(static_cast<int>(meshes.size())),
        residency_(meshes),
        units_(meshes.size()) {
    order_.set_shared(residency_.gathers(), meshes.size());
  }
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  // Bracket a root forward; with `grad` it records a graph.
  void begin_pass(bool grad, Actions& out);
  void enter(UnitId unit, bool grad, Actions& out);
  // `reads`: the call's backward may read the unit's parameters; always true in a pass that does
  // not follow the order. With `keep`, outside of a root forward, the unit stays unsharded until
  // another unit is entered.
  CallHandle exit(UnitId unit, bool needs_backward, bool reads, Actions& out, bool keep = false);
  // Returns the number of this rank's open calls.
  size_t num_entered() const {
    return frames_.size();
  }
  // Forgets all but the first `num` open calls. The others have failed and will not exit.
  void cancel_calls(size_t num);
  // Does leave_pass and finish_pass together, if there are no other ranks.
  void end_pass(Actions& out);

  // -- messages between ranks, see Note [One order on every rank]
  // Returns whether the running pass, or else the last one, follows the order.
  bool follows_order() const {
    return follows_;
  }
  // Runs the rest of the order.
  void finish_order(Actions& out);
  // Returns by call whether it is open on this rank, or ended late here.
  std::vector<bool> open_calls() const;
  // Takes the open calls of all ranks, before a call is added or the pass is finished.
  void hear_open_calls(const std::vector<bool>& open) {
    order_.extend(open);
  }
  // Adds a call of other ranks only, and unshards and reshards its unit.
  void serve(UnitId unit, Actions& out);
  // Leaves the pass on this rank, which may still have to serve the others.
  void leave_pass(Actions& out);
  const CallOrder& order() const {
    return order_;
  }
  // Returns the events of the order, with `reads` as in the last finished pass.
  Instructions expected() const;
  // Returns whether the backward of a lookup reads parameters on this rank.
  bool reads_more() const {
    return reads_more_;
  }
  // Finishes the pass that this rank has left. `agreed`: all ranks have made the same calls;
  // otherwise `needs` is the union of their CallOrder::needs. `reads_all`: any rank has
  // reads_more().
  void finish_pass(bool agreed, const std::vector<bool>& needs, bool reads_all);
  // Replaces finish_pass if the pass failed: no rank may run a backward through it.
  void drop_pass();
  // Forgets all passes after an exception, and reshards all units that are not held.
  void abort(Actions& out);

  // -- the backward pass: runs the program of the pass that goes backward
  void begin_backward();
  // Reports that the call's backward is about to run. Returns whether this is the first report.
  bool pre_backward(const CallHandle& call, Actions& out);
  // Reports that all gradients of the unit exist. A unit that is resharded after use is reduced
  // later, when the backward has moved past it.
  void ready(UnitId unit, Actions& out);
  void end_backward(Actions& out);
  // For a recomputed call, see Note [Recomputed calls]: runs the instructions of all calls that the
  // backward is past.
  void reach(const BackwardPosition& position, Actions& out);
  // Returns whether the call's backward is the next instruction.
  bool is_next(const CallHandle& call) const;
  // Reports a recomputed call; returns as pre_backward does. The call needs pass -1 unless
  // is_next().
  bool recompute(const CallHandle& call, Actions& out);
  // Returns whether a backward that continues in `pass` abandons the program of a later pass.
  bool abandons_program(int64_t pass) const {
    return pass < backward_ && passes_.records(pass);
  }
  // Returns whether pre_backward would unshard the unit out of turn.
  bool is_out_of_turn(const CallHandle& call) const;
  // Runs the rest of the backward's program. Gradients that arrive later are reduced when the
  // backward ends.
  void finish_program(Actions& out);
  // finish_program() within a backward: units that the backward uses keep their memory here.
  void abandon_program(Actions& out);
  // Sets whether the starting backward reduces the unit's gradients.
  void set_reduced(UnitId unit, bool reduced) {
    units_.at(unit).reduced = reduced;
  }
  bool is_reduced(UnitId unit) const {
    return units_.at(unit).reduced;
  }
  // Returns a hash of the programs that the last backward has started; equal on all ranks.
  uint64_t shape() const {
    return shape_;
  }
  // Serves a unit that this rank needs, too: it keeps the memory until the backward ends.
  void serve_and_keep(UnitId unit, Actions& out);

  // Marks the unit's gathered parameters as stale. With `trained`, parameters that require grad
  // have changed, so no backward of an earlier forward goes through the unit.
  void invalidate(UnitId unit, Actions& out, bool trained = true);
  // For units that other means than calls gather or hold.
  Residency& residency() {
    return residency_;
  }

  ForwardPasses& passes() {
    return passes_;
  }
  // Returns whether the unit is unsharded on this rank, or its all-gather was issued.
  bool is_resident(UnitId unit) const {
    return residency_.is_here(unit);
  }
  // Returns whether a call, a backward or a hold uses the unit.
  bool is_active(UnitId unit) const {
    const Residency::Uses& uses = residency_.uses(unit);
    return uses.entered > 0 || uses.in_backward || uses.kept_for_backward || uses.holds > 0;
  }
  // Returns whether modules show the unit's full parameters.
  bool is_shown(UnitId unit) const {
    return residency_.is_here(unit) && (is_active(unit) || residency_.uses(unit).stays);
  }
  // Returns whether this rank is in a call of the unit.
  bool is_entered(UnitId unit) const {
    return residency_.uses(unit).entered > 0;
  }
  bool is_held_unsharded(UnitId unit) const {
    return residency_.uses(unit).holds > 0;
  }
  bool in_root_forward() const {
    return in_root_forward_;
  }

 private:
  // An open call of this rank.
  struct Frame {
    UnitId unit = -1;
    int64_t pass = -1; // -1 if the call is not recorded
    int32_t call = -1;
    bool follows = false; // the call belongs to the order
  };

  void close_loose_pass();
  void open_loose_pass();
  int32_t enter_in_order(UnitId unit, Actions& out);
  void exit_calls(Actions& out);

  // Runs the program up to `end`, also the calls that this rank does not make, so that all ranks
  // issue the same collectives.
  void run_to(Program& program, size_t end, Actions& out);
  void carry_out(const Instruction& due, Actions& out);
  void do_enter(UnitId unit, Actions& out);
  void do_exit(const Instruction& due, Actions& out);
  void do_release(const Instruction& due, Actions& out);

  std::vector<bool> reduced_later(const ForwardPass& pass) const;
  void start_program(ForwardPass& pass, Actions& out);
  void go_to_pass(ForwardPass& pass, Actions& out);
  void forget_backward();

  const int prefetch_;
  const bool retain_last_;
  CallOrder order_;
  ForwardPasses passes_;
  Residency residency_;
  std::vector<Frame> frames_; // innermost last
  int64_t open_ = -1; // id of the running forward pass
  int64_t left_ = -1; // id of the pass that this rank has left and others may still be in
  bool in_root_forward_ = false;
  bool follows_ = false; // the running pass follows the order
  bool reads_more_ = false, reads_all_ = false; // in the running pass; in the last finished one
  UnitId retained_ = -1; // the forward's last unit, which stays unsharded for the backward
  // State of a unit in the running backward.
  struct BackwardUnit {
    int32_t call = -1; // the call whose backward began last
    bool ready = false; // all gradients of that call exist
    bool reduced = true; // this backward reduces the unit
    bool due = false; // the reduction is still to come, at the latest when the backward ends
  };
  std::vector<BackwardUnit> units_;
  int64_t backward_ = -1; // id of the pass whose program runs
  uint64_t shape_ = 0; // hash of the programs that this backward has started
  bool waits_ = true; // units wait for their earlier passes, see reduced_later()
};

} // namespace zerocore
