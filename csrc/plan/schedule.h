// Decides when a unit is unsharded, resharded and reduced; integers only.
//
// The engine reports what happens (a unit is entered, left, about to run backward, has all its
// gradients) and carries out the actions it gets back, in order. The planner drives the very same
// object with the expected events, which is why its prediction is what the runtime does.
//
// Note [One order on every rank]
// Collectives must be issued in one order on all ranks, also when they take different ways. A
// rooted pass (one call of the sharded model) therefore follows an order of calls that is the same
// on all ranks: a call is looked up in what is left of it, and what lies before is unsharded and
// resharded in its turn. A call that is not found comes behind all others: this rank goes through
// the rest of the order and then asks the others, who, when they have come to the end, serve it
// (unshard and reshard the unit without using it). When all have ended, and if the pass was not
// what was expected, ranks compare their calls; that gives the list from which the pass's backward
// follows and the order of the next pass. The first order is that of registration.
//
// Which units are resident follows from the order alone. A call that a rank leaves later than the
// order has it keeps the memory (`held`) of a unit that counts as resharded, until it is left. So
// does a rank that asks for a unit in its backward, until that ends.
//
// Units called outside of the sharded model's own call are served on demand, without prefetch; all
// ranks must make these calls. So it is in a pass without gradients that finds all units there.
//
// Note [Passes whose backward never comes]
// A unit of several passes is reduced in the backward of the first of them: in one backward through
// all of them that is once, at the end. The backward of a pass may never come (its output was
// detached), so what is still due when the backward ends is reduced then. That follows from the
// calls alone, never from which gradients this rank has: another rank may have others. After such
// an end the next backwards reduce pass by pass.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "common/types.h"
#include "plan/backward_steps.h"
#include "plan/call_order.h"
#include "plan/shard_options.h"
#include "plan/stage_policy.h"

namespace zerocore {

enum class ActionKind : uint8_t { Unshard, Reshard, Reduce };

struct Action {
  ActionKind kind = ActionKind::Unshard;
  UnitId unit = -1;
};

using Actions = std::vector<Action>;

// One forward call of a unit, as the backward refers to it.
struct CallHandle {
  int64_t pass = -1;
  int32_t call = -1; // its number in the pass
  UnitId unit = -1;
};

struct ScheduleOptions {
  int num_units = 0;
  int prefetch = 1; // units gathered ahead
  bool gathers = true; // parameters have to be gathered at all
  bool releases = true; // unsharded parameters are given back after use (stage 3)
};

ScheduleOptions schedule_options(
    int num_units,
    const ShardOptions& sharding,
    const StagePolicy& policy);

class Schedule {
 public:
  // `order` is the expected sequence of enters and exits of a rooted pass.
  Schedule(ScheduleOptions options, std::vector<CallEvent> order);

  // Forward. A pass is rooted from begin_pass to end_pass; grad says whether it records a graph.
  void begin_pass(bool grad, Actions& out);
  void enter(UnitId unit, bool grad, Actions& out);
  // `keep`: outside of a pass the unit stays unsharded until another one is entered.
  CallHandle exit(UnitId unit, bool needs_backward, Actions& out, bool keep = false);
  // close_pass, and learn where there are no other ranks to compare with.
  void end_pass(Actions& out);

  // Between ranks, see Note [One order on every rank].
  // Whether the pass under way (or closed last) has the same calls on all ranks.
  bool follows_order() const {
    return follows_;
  }
  // Whether the order still has a call of the unit.
  bool is_expected(UnitId unit) const {
    return order_.find(unit).has_value();
  }
  // Goes through what is left of the order.
  void finish_order(Actions& out);
  // A call that other ranks make and the order does not have.
  void serve(UnitId unit, Actions& out);
  // This rank has left the pass; ranks that have not may have to be served.
  void close_pass(Actions& out);
  // Whether ranks have to compare their calls after close_pass.
  bool changed() const {
    return order_.changed();
  }
  bool skipped() const {
    return order_.skipped();
  }
  const PassCalls& calls() const {
    return order_.calls();
  }
  // Settles the pass that was closed: with the calls of all ranks if any of them changed, else with
  // none.
  void settle_pass(const std::vector<PassCalls>& ranks, int own);
  // In place of settle_pass: no rank runs a backward through the pass.
  void drop_pass();
  // The pass ended with an exception: gives everything back, forgets the pass.
  void abort(Actions& out);

  // Backward.
  void begin_backward();
  // True when this is the first news of the call's backward.
  bool pre_backward(const CallHandle& call, Actions& out);
  // A unit is entered while a backward runs (activation checkpointing). True as above.
  bool recompute(UnitId unit, Actions& out);
  // The call that recompute takes for this one; of pass -1 if there is none left.
  CallHandle recomputed_call(UnitId unit, Actions& out);
  // All gradients of the unit exist.
  void ready(UnitId unit, Actions& out);
  void end_backward(Actions& out);
  // Whether pre_backward is going to unshard the unit out of turn.
  bool is_out_of_turn(const CallHandle& call) const;
  // Does the rest of the backward's steps; gradients still to come are reduced at its end.
  void finish_steps(Actions& out);
  // Unshards and reshards a unit that other ranks need.
  void serve_one(UnitId unit, Actions& out);
  // As serve_one, on a rank that needs the unit: it keeps it to the end of the backward.
  void take_one(UnitId unit, Actions& out);

  // The unit's parameters changed: what was gathered is stale, and no backward comes through it for
  // a forward before.
  void invalidate(UnitId unit, Actions& out);
  // Keeps a unit unsharded whatever happens, until it is released.
  void hold_unsharded(UnitId unit, Actions& out);
  void release_unsharded(UnitId unit, Actions& out);

  // Whether the unit has gradients to reduce at all.
  void set_reducible(UnitId unit, bool reducible) {
    units_.at(unit).reducible = reducible;
  }
  // Whether the backward that begins leaves the unit's gradients alone; until the next one begins.
  void set_muted(UnitId unit, bool muted) {
    units_.at(unit).muted = muted;
  }
  const std::vector<CallEvent>& order() const {
    return order_.events();
  }
  // The unit's full parameters are there, or on their way.
  bool is_resident(UnitId unit) const {
    return units_.at(unit).resident || units_.at(unit).late;
  }
  // In use by forward or backward: the modules show the unsharded parameters.
  bool is_active(UnitId unit) const {
    const UnitState& state = units_.at(unit);
    return state.held > 0 || state.in_backward || state.holds > 0;
  }
  // A call of the unit that this rank makes has not been left.
  bool is_entered(UnitId unit) const {
    return units_.at(unit).held > 0;
  }
  bool is_held_unsharded(UnitId unit) const {
    return units_.at(unit).holds > 0;
  }
  bool in_rooted_pass() const {
    return rooted_;
  }
  // A number for the calls whose backward has begun, the same on all ranks; of the last backward.
  uint64_t backward_shape() const {
    return shape_;
  }
  // Passes before this one are forgotten.
  int64_t oldest_pass() const {
    return passes_.empty() ? next_pass_ : passes_.front().id;
  }

 private:
  struct UnitState {
    int active = 0; // calls entered and not left, by the order
    int held = 0; // calls that this rank has entered and not left
    int holds = 0; // hold_unsharded() without its release_unsharded()
    bool resident = false; // unsharded, or on its way
    bool late = false; // not resident any more, but held, or used by this rank's backward
    bool in_backward = false;
    bool ready = false;
    bool reducible = true;
    bool muted = false; // in this backward
    bool due = false; // to be reduced in this backward, at its end at the latest
    int64_t changed_at = 0; // passes before this one have older parameters
  };
  struct Pass {
    int64_t id = 0;
    bool grad = false;
    bool consumed = false; // a backward ran through it
    std::vector<CallEvent> events;
    int32_t num_calls = 0; // of a pass that does not follow the order
    std::vector<Step> steps; // of the backward under way
    size_t next = 0; // first step not done
  };
  struct Frame {
    UnitId unit = -1;
    int64_t pass = -1; // -1 if it is not recorded
    int32_t call = -1;
    bool follows = false; // is a call of the order
  };

  Pass& open_pass(bool grad);
  void close_loose_pass();
  void forget_old_passes();
  bool is_outdated(const Pass& pass) const;
  Pass* find_pass(int64_t id);
  const Pass* find_pass(int64_t id) const;

  void go_through(const CallEvent& event, Actions& out);
  void go_to(int32_t call, Actions& out);
  void leave_calls(Actions& out);
  int32_t enter_in_order(UnitId unit, Actions& out);
  void do_enter(UnitId unit, Actions& out);
  void do_exit(UnitId unit, bool needs_backward, Actions& out);

  std::vector<bool> reduced_later(const Pass& pass) const;
  void start_steps(Pass& pass, Actions& out);
  void do_step(const Step& step, Actions& out);
  void run_steps(Pass& pass, size_t end, Actions& out);
  void run_gathers(Actions& out);
  bool gathered_next(UnitId unit) const;

  void unshard(UnitId unit, Actions& out);
  void reshard(UnitId unit, Actions& out);
  void reshard_all_but(const std::vector<UnitId>& keep, Actions& out);

  ScheduleOptions options_;
  CallOrder order_;
  std::vector<UnitState> units_;
  std::vector<Frame> frames_; // units entered and not left
  std::deque<Pass> passes_; // passes a backward may still come for, also once more
  int64_t next_pass_ = 0;
  int64_t open_ = -1; // id of the forward pass under way
  int64_t closed_ = -1; // id of the pass that was closed and is to be settled
  int64_t backward_ = -1; // id of the pass whose steps are being done
  uint64_t shape_ = 0; // of the passes whose steps were begun in this backward
  bool rooted_ = false;
  bool follows_ = false; // the pass under way follows the order
  bool outdated_ = false; // parameters have changed since passes were last forgotten
  bool waits_ = true; // one backward through several passes reduces each unit once
  UnitId retained_ = -1; // left last; kept for the backward
};

} // namespace zerocore
