// Decides when a unit is unsharded, resharded and reduced; integers only.
//
// The engine reports what happens (a unit is entered, left, about to run backward, has all its
// gradients) and carries out the actions it gets back, in order. The planner drives the very same
// object with the expected events, which is why its prediction is what the runtime does.
//
// Note [One order on every rank]
// Collectives must be issued in one order on all ranks, also when they take different ways. A
// forward of the root (one call of the sharded model) therefore follows an order of calls that is
// the same on all ranks: a call is looked up in what is left of it, and what lies before is
// unsharded and resharded in its turn. A call that is not found comes behind all others: this rank
// goes through the rest of the order and then asks the others, who, when they have come to the end,
// serve it (unshard and reshard the unit without using it). So all ranks know all calls of the
// pass. As they leave it they compare a hash of the calls that each has made. If all ranks have
// made the same, these are the order of the next pass; else the order stays. The first order is
// that of registration. The pass's backward follows from the calls of the order, then those that
// were added to it, and from which of them need a backward on any rank.
//
// Note [Gathers that nobody reads]
// The backward of an embedding's lookup reads indices and no weight, so gathering the weight for it
// moves bytes for nothing. Which calls of the order are lookups follows from the classes of
// modules, which are the same on all ranks. Hooks, or another module of the same weight, may read
// it all the same: if any rank says so as it leaves the pass, all calls of this pass count as
// reading.
//
// Note [Passes whose backward never comes]
// A unit of several passes is reduced in the backward of the first of them: in one backward through
// all of them that is once, at the end. The backward of a pass may never come (its output was
// detached), so what is still due when the backward ends is reduced then. That follows from the
// calls alone, never from which gradients this rank has: another rank may have others. After such
// an end the next backwards reduce pass by pass.
//
// Note [Recomputed calls]
// A checkpoint makes its calls again in the order of the forward, and then goes backward through
// them. Only the last of them is what comes next in the order of the backward, and begins it. The
// ones before are unsharded out of turn, and each one's backward begins when it comes, by its
// output. So no instruction of a call is carried out before the backward is there.
//
// Units called outside of the sharded model's own call are served on demand, without prefetch; all
// ranks must make these calls. So it is in a pass without gradients that finds all units there.
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

// How far a backward has come: it has left the calls of the pass that are numbered `end` and more.
struct BackwardPlace {
  int64_t pass = -1; // -1 if it is not known
  int32_t end = 0;
};

class Schedule {
 public:
  // Meshes by unit; `order` is the expected sequence of enters and exits in a forward of the root.
  Schedule(const std::vector<UnitMesh>& meshes, const ShardOptions& sharding, Instructions order)
      : prefetch_(sharding.prefetch),
        retain_last_(sharding.retain_last),
        order_(std::move(order)),
        passes_(static_cast<int>(meshes.size())),
        residency_(meshes),
        units_(meshes.size()) {
    order_.set_shared(residency_.gathers(), meshes.size());
  }
  Schedule(const Schedule&) = delete; // its parts refer to each other
  Schedule& operator=(const Schedule&) = delete;

  // A forward of the root, from begin_pass to end_pass; grad says whether it records a graph.
  void begin_pass(bool grad, Actions& out);
  void enter(UnitId unit, bool grad, Actions& out);
  // `reads`: the call's backward may read the unit's parameters, which outside of a pass is taken
  // for granted. `keep`: outside of a pass the unit stays unsharded until another one is entered.
  CallHandle exit(UnitId unit, bool needs_backward, bool reads, Actions& out, bool keep = false);
  // Calls of this rank that were entered and not left.
  size_t num_entered() const {
    return frames_.size();
  }
  // Forgets all but the first `num` of them: they have failed, and have no exit.
  void cancel_calls(size_t num);
  // leave_pass and finish_pass, where there are no other ranks.
  void end_pass(Actions& out);

  // Between ranks, see Note [One order on every rank].
  // Whether the pass under way (or left last) has the same calls on all ranks.
  bool follows_order() const {
    return follows_;
  }
  // Goes through what is left of the order.
  void finish_order(Actions& out);
  // Calls that this rank is in, or has left late, as CallOrder::needs; and those of any rank,
  // before a call is added or the pass finished.
  std::vector<bool> open_calls() const;
  void hear_open_calls(const std::vector<bool>& open) {
    order_.extend(open);
  }
  // A call that other ranks make and the order does not have.
  void serve(UnitId unit, Actions& out);
  // This rank has left the pass; ranks that have not may have to be served.
  void leave_pass(Actions& out);
  const CallOrder& order() const {
    return order_;
  }
  // The events of the order. Whether the backward of a call reads parameters is as it was in the
  // pass that was finished last.
  Instructions expected() const;
  // Whether the backward of a call reads parameters on this rank which the order has as a lookup.
  bool reads_more() const {
    return reads_more_;
  }
  // Finishes the pass that was left. `agreed`: all ranks have made the same calls; else `needs`
  // has CallOrder::needs of all ranks. `reads_all`: any rank reads_more().
  void finish_pass(bool agreed, const std::vector<bool>& needs, bool reads_all);
  // In place of finish_pass: no rank runs a backward through the pass.
  void drop_pass();
  // The pass ended with an exception: gives everything back, forgets the pass.
  void abort(Actions& out);

  // Backward: carries out the program of the pass that runs backward.
  void begin_backward();
  // The call's backward is about to run. True when this is the first news of it.
  bool pre_backward(const CallHandle& call, Actions& out);
  // All gradients of the unit exist. One that is released is reduced when the backward has left it.
  void ready(UnitId unit, Actions& out);
  void end_backward(Actions& out);
  // A call is made again in the backward (activation checkpointing). See Note [Recomputed calls].
  // Comes to where the backward is: carries out what is due of calls that it has left.
  void reach(const BackwardPlace& place, Actions& out);
  // Whether the call's backward is what comes next in the order.
  bool is_next(const CallHandle& call) const;
  // True as pre_backward; a call that is not next in the order has none here (pass -1).
  bool recompute(const CallHandle& call, Actions& out);
  // Whether a backward that goes on in the pass leaves another one's program.
  bool leaves_program(int64_t pass) const {
    return pass < backward_ && passes_.records(pass);
  }
  // Whether pre_backward is going to unshard the unit out of turn.
  bool is_out_of_turn(const CallHandle& call) const;
  // Carries out what is left of the backward's program. Gradients that come after it are reduced
  // when the backward ends.
  void finish_program(Actions& out);
  // As finish_program, in the midst of a backward: what it uses stays on this rank.
  void leave_program(Actions& out);
  // Whether the backward that begins reduces the unit's gradients; until the next one begins.
  void set_reduced(UnitId unit, bool reduced) {
    units_.at(unit).reduced = reduced;
  }
  bool is_reduced(UnitId unit) const {
    return units_.at(unit).reduced;
  }
  // A number for the calls whose backward has begun, the same on all ranks; of the last backward.
  uint64_t shape() const {
    return shape_;
  }
  // As Residency::serve, on a rank that needs the unit: it keeps it to the end of the backward.
  void serve_and_keep(UnitId unit, Actions& out);

  // The unit's parameters changed: what was gathered is stale, and, if `trained` ones did, no
  // backward comes through it for a forward before.
  void invalidate(UnitId unit, Actions& out, bool trained = true);
  // For what is gathered or kept for other reasons than calls.
  Residency& residency() {
    return residency_;
  }

  ForwardPasses& passes() {
    return passes_;
  }
  // The unit's full parameters are there, or on their way.
  bool is_resident(UnitId unit) const {
    return residency_.is_here(unit);
  }
  // In use by forward or backward.
  bool is_active(UnitId unit) const {
    const Residency::Uses& uses = residency_.uses(unit);
    return uses.entered > 0 || uses.in_backward || uses.kept_for_backward || uses.holds > 0;
  }
  // The modules show the unsharded parameters.
  bool is_shown(UnitId unit) const {
    return residency_.is_here(unit) && (is_active(unit) || residency_.uses(unit).stays);
  }
  // A call of the unit that this rank makes has not been left.
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
  struct Frame {
    UnitId unit = -1;
    int64_t pass = -1; // -1 if it is not recorded
    int32_t call = -1;
    bool follows = false; // is a call of the order
  };

  void close_loose_pass();
  void open_loose_pass();
  int32_t enter_in_order(UnitId unit, Actions& out);
  void leave_calls(Actions& out);

  // Carries out the instructions before `end` that are left, also those of calls that this rank
  // does not make: so all ranks issue the same collectives.
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
  std::vector<Frame> frames_; // units entered and not left
  int64_t open_ = -1; // id of the forward pass under way
  int64_t left_ = -1; // id of the pass that this rank has left and others may not
  bool in_root_forward_ = false;
  bool follows_ = false; // the pass under way follows the order
  bool reads_more_ = false, reads_all_ = false; // the pass under way; the one finished last
  UnitId retained_ = -1; // left last; kept for the backward
  // Of the backward under way.
  struct BackwardUnit {
    int32_t call = -1; // whose backward began last
    bool ready = false; // that call is
    bool reduced = true; // in this backward
    bool due = false; // to be reduced in this backward, at its end at the latest
  };
  std::vector<BackwardUnit> units_;
  int64_t backward_ = -1; // id of the pass whose program is carried out
  uint64_t shape_ = 0; // of the passes whose programs were begun in this backward
  bool waits_ = true; // one backward through several passes reduces each unit once
};

} // namespace zerocore
