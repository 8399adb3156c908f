// Decides when a unit is unsharded, resharded and reduced; integers only.
//
// The engine reports events (a unit is entered, left, about to run backward, has all its gradients)
// and carries out the actions that it gets back, in order. The planner drives the same object with
// the expected events, so it predicts exactly what the runtime does.
//
// Note [One order on every rank]
// All ranks must issue collectives in one order, even if they take different paths. So a root
// forward (one call of the sharded model) follows an order of calls that is the same on all ranks.
// When a rank makes a call, it finds the call in the rest of the order, and unshards and reshards
// the units of the calls that it skips. A call that is not in the order is added at its end: the
// rank runs the rest of the order and then asks the others. They serve it when they reach the end:
// they unshard and reshard the unit without using it. So all ranks know all calls of the pass. As
// they leave it they compare a hash of the calls that each has made. If the hashes agree, these
// calls are the order of the next pass; else the order stays. The first order is the one in which
// modules were registered. The backward of a pass goes through the calls of the order and those
// added to it, as far as any rank needs their backward.
//
// Note [Gathers that no rank reads]
// The backward of an embedding lookup reads indices and no weight, so an all-gather for it would be
// wasted. The classes of modules, equal on all ranks, tell which calls of the order are lookups.
// Hooks, or another module that shares the weight, may read it all the same. If any rank says so as
// it leaves the pass, all calls of this pass count as reading.
//
// Note [Passes whose backward never comes]
// If several passes use a unit, the backward of the first pass reduces it. One backward through all
// of them therefore reduces it once, at the end. The backward of a pass may never come, because its
// output was detached. So when a backward ends, it reduces all units that are still due. This
// depends on the calls alone, never on this rank's gradients, since another rank may have others.
// After such an end, later backwards reduce pass by pass.
//
// Note [Recomputed calls]
// An activation checkpoint repeats its calls in the order of the forward, and then goes backward
// through them. Only the last of them is next in the backward's program, and advances it. The
// earlier calls are unsharded out of turn; the backward of each begins when autograd reaches its
// output. So no instruction of a call is carried out before autograd gets there.
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

// The position of a backward: it has left all calls of the pass from number `end` on.
struct BackwardPlace {
  int64_t pass = -1; // -1 if unknown
  int32_t end = 0;
};

// The schedule of one model: its order of calls, its programs, and which units are unsharded.
class Schedule {
 public:
  // `meshes` is by unit. `order` has the enters and exits that a root forward is expected to make.
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

  // Bracket a root forward; `grad` says that it records a graph.
  void begin_pass(bool grad, Actions& out);
  void enter(UnitId unit, bool grad, Actions& out);
  // `reads` says that the call's backward may read the unit's parameters; it counts as true if the
  // pass does not follow the order. With `keep`, outside of a root forward, the unit stays
  // unsharded until another unit is entered.
  CallHandle exit(UnitId unit, bool needs_backward, bool reads, Actions& out, bool keep = false);
  // Returns how many calls of this rank were entered and not left.
  size_t num_entered() const {
    return frames_.size();
  }
  // Forgets all but the first `num` of these calls. The others have failed and will not exit.
  void cancel_calls(size_t num);
  // Does leave_pass and finish_pass at once, if there are no other ranks.
  void end_pass(Actions& out);

  // -- messages between ranks, see Note [One order on every rank]
  // Returns whether the running pass (or the one left last) follows the order.
  bool follows_order() const {
    return follows_;
  }
  // Runs the rest of the order.
  void finish_order(Actions& out);
  // Returns by call whether this rank is in it, or has left it late.
  std::vector<bool> open_calls() const;
  // Takes the open calls of all ranks, before a call is added or the pass is finished.
  void hear_open_calls(const std::vector<bool>& open) {
    order_.extend(open);
  }
  // Adds a call that only other ranks make, and unshards and reshards its unit.
  void serve(UnitId unit, Actions& out);
  // Leaves the pass on this rank, which may still have to serve the others.
  void leave_pass(Actions& out);
  const CallOrder& order() const {
    return order_;
  }
  // Returns the events of the order, with `reads` as in the last finished pass.
  Instructions expected() const;
  // Returns whether, on this rank, the backward of a lookup reads parameters.
  bool reads_more() const {
    return reads_more_;
  }
  // Finishes the pass that was left. `agreed` says that all ranks have made the same calls; if not,
  // `needs` unites their CallOrder::needs. `reads_all` says that any rank has reads_more().
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
  // later, when the backward has left it.
  void ready(UnitId unit, Actions& out);
  void end_backward(Actions& out);
  // For a recomputed call, see Note [Recomputed calls]: runs the instructions of all calls that the
  // backward has left.
  void reach(const BackwardPlace& place, Actions& out);
  // Returns whether the call's backward is the next instruction.
  bool is_next(const CallHandle& call) const;
  // Reports a recomputed call; returns as pre_backward does. Give a call that is not is_next() the
  // pass -1.
  bool recompute(const CallHandle& call, Actions& out);
  // Returns whether a backward that goes on in `pass` leaves the program of a later pass.
  bool leaves_program(int64_t pass) const {
    return pass < backward_ && passes_.records(pass);
  }
  // Returns whether pre_backward would unshard the unit out of turn.
  bool is_out_of_turn(const CallHandle& call) const;
  // Runs the rest of the backward's program. Gradients that come later are reduced when the
  // backward ends.
  void finish_program(Actions& out);
  // The same in the middle of a backward: units that the backward uses stay on this rank.
  void leave_program(Actions& out);
  // Sets whether the backward that begins reduces the unit's gradients.
  void set_reduced(UnitId unit, bool reduced) {
    units_.at(unit).reduced = reduced;
  }
  bool is_reduced(UnitId unit) const {
    return units_.at(unit).reduced;
  }
  // Returns a hash of the programs that the last backward has begun; it is the same on all ranks.
  uint64_t shape() const {
    return shape_;
  }
  // Serves a unit that this rank also needs itself: keeps it until the backward ends.
  void serve_and_keep(UnitId unit, Actions& out);

  // Marks the unit's gathered parameters as stale. With `trained`, parameters that require grad
  // have changed, so no backward of an earlier forward goes through the unit.
  void invalidate(UnitId unit, Actions& out, bool trained = true);
  // For units that are gathered or kept by other means than calls.
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
  // A call of a unit that was entered and not left.
  struct Frame {
    UnitId unit = -1;
    int64_t pass = -1; // -1 if the call is not recorded
    int32_t call = -1;
    bool follows = false; // it is a call of the order
  };

  void close_loose_pass();
  void open_loose_pass();
  int32_t enter_in_order(UnitId unit, Actions& out);
  void leave_calls(Actions& out);

  // Runs the program up to `end`, even the calls that this rank does not make, so that all ranks
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
  bool reads_more_ = false, reads_all_ = false; // of the running pass; of the last finished one
  UnitId retained_ = -1; // the forward left this unit last; it stays for the backward
  // State of a unit in the running backward.
  struct BackwardUnit {
    int32_t call = -1; // the call whose backward began last
    bool ready = false; // all gradients of that call exist
    bool reduced = true; // this backward reduces the unit
    bool due = false; // the reduction is still to come, at the latest when the backward ends
  };
  std::vector<BackwardUnit> units_;
  int64_t backward_ = -1; // id of the pass whose program runs
  uint64_t shape_ = 0; // hash of the programs that this backward has begun
  bool waits_ = true; // a unit waits for its earlier passes, see reduced_later()
};

} // namespace zerocore
