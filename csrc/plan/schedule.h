// Decides when a unit is unsharded, resharded and reduced; integers only.
//
// The engine reports what happens (a unit is entered, left, about to run backward, has all its
// gradients) and carries out the actions it gets back, in order. The planner drives the very same
// object with the expected events, which is why its prediction is what the runtime does.
//
// Note [One order on every rank]
// Collectives must be issued in one order on all ranks, also when a rank does not take a branch.
// A rooted pass (one call of the sharded model) therefore follows the order learned from earlier
// passes: units passed over are unsharded and resharded in their turn. A call that the learned
// order does not have (all ranks must make it) is served on demand, and the order is relearned
// when the pass ends. The first order is that of registration. Units called outside of the
// sharded model's own call are served on demand, without prefetch.
//
// Note [Passes whose backward never comes]
// A unit of several passes is reduced in the backward of the first of them: in one backward through
// all of them that is once, at the end. The backward of a pass may never come (its output was
// detached), so what is still due when the backward ends is reduced then. That follows from the
// calls alone, never from which gradients this rank has: another rank may have others. After such
// an end the next backwards reduce pass by pass.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "common/types.h"
#include "plan/backward_steps.h"

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
  int32_t exit = -1;
  UnitId unit = -1;
};

struct ScheduleOptions {
  int num_units = 0;
  int prefetch = 1; // units gathered ahead
  bool gathers = true; // parameters have to be gathered at all
  bool releases = true; // unsharded parameters are given back after use (stage 3)
};

class Schedule {
 public:
  // `order` is the expected sequence of enters and exits of a rooted pass.
  Schedule(ScheduleOptions options, std::vector<CallEvent> order);

  // Forward. A pass is rooted from begin_pass to end_pass; grad says whether it records a graph.
  void begin_pass(bool grad, Actions& out);
  void enter(UnitId unit, bool grad, Actions& out);
  // `keep`: outside of a pass the unit stays unsharded until another one is entered.
  CallHandle exit(UnitId unit, bool needs_backward, Actions& out, bool keep = false);
  void end_pass(Actions& out);
  // The pass ended with an exception: gives everything back, forgets the pass.
  void abort(Actions& out);

  // Backward.
  void begin_backward();
  // True when this is the first news of the call's backward.
  bool pre_backward(const CallHandle& call, Actions& out);
  // A unit is entered while a backward runs (activation checkpointing). True as above.
  bool recompute(UnitId unit, Actions& out);
  // All gradients of the unit exist.
  void ready(UnitId unit, Actions& out);
  void end_backward(Actions& out);

  // The unit's parameters changed: what was gathered is stale, and no backward comes through it for
  // a forward before.
  void invalidate(UnitId unit, Actions& out);
  // Keeps a unit unsharded whatever happens, until unpinned.
  void pin(UnitId unit, Actions& out);
  void unpin(UnitId unit, Actions& out);

  // Whether the unit has gradients to reduce at all.
  void set_reducible(UnitId unit, bool reducible) {
    units_.at(unit).reducible = reducible;
  }
  // Whether the backward that begins leaves the unit's gradients alone; until the next one begins.
  void set_muted(UnitId unit, bool muted) {
    units_.at(unit).muted = muted;
  }
  // Drops the units that no rank has called from the order; one flag per unit.
  void prune(const std::vector<bool>& called);
  // Units that this rank really called, not skipped, since the schedule was made.
  const std::vector<bool>& called() const {
    return called_;
  }

  const std::vector<CallEvent>& order() const {
    return order_;
  }
  bool is_resident(UnitId unit) const {
    return units_.at(unit).resident;
  }
  // In use by forward or backward: the modules show the unsharded parameters.
  bool is_active(UnitId unit) const {
    const UnitState& state = units_.at(unit);
    return state.active > 0 || state.in_backward || state.pinned > 0;
  }
  // A call of the unit that this rank makes has not been left.
  bool is_entered(UnitId unit) const {
    return std::any_of(
        frames_.begin(), frames_.end(), [&](const Frame& frame) { return frame.unit == unit; });
  }
  bool is_pinned(UnitId unit) const {
    return units_.at(unit).pinned > 0;
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
    int active = 0; // calls entered and not left
    int skipped = 0; // those of them that this rank does not make
    int pinned = 0;
    bool resident = false; // unsharded, or on its way
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
    std::vector<Step> steps; // of the backward under way
    size_t next = 0; // first step not done
  };
  struct Frame {
    UnitId unit = -1;
    bool in_order = false; // matched an event of order_
    bool recorded = false; // is an event of the open pass
  };

  Pass& open_pass(bool grad);
  void close_loose_pass();
  void forget_old_passes();
  bool is_outdated(const Pass& pass) const;
  Pass* find_pass(int64_t id);

  std::optional<size_t> find_event(EventKind kind, UnitId unit) const;
  void skip_to(size_t event, Actions& out);
  void skip(CallEvent event, Actions& out);
  std::vector<UnitId> upcoming(int count) const;
  void do_enter(UnitId unit, Actions& out);
  void do_exit(UnitId unit, bool needs_backward, bool keep, Actions& out);
  void relearn(const Pass& pass);

  std::vector<bool> reduced_later(const Pass& pass) const;
  void start_steps(Pass& pass, Actions& out);
  void do_step(const Step& step, Actions& out);
  void run_steps(Pass& pass, size_t end, Actions& out);
  void run_gathers(Actions& out);
  void finish_steps(Actions& out);
  bool gathered_next(UnitId unit) const;

  void unshard(UnitId unit, Actions& out);
  void reshard(UnitId unit, Actions& out);
  void reshard_all_but(const std::vector<UnitId>& keep, Actions& out);

  ScheduleOptions options_;
  std::vector<CallEvent> order_;
  std::vector<UnitState> units_;
  std::vector<bool> called_;
  std::vector<Frame> frames_; // units entered and not left
  std::deque<Pass> passes_; // passes a backward may still come for, also once more
  int64_t next_pass_ = 0;
  int64_t open_ = -1; // id of the forward pass under way
  int64_t backward_ = -1; // id of the pass whose steps are being done
  uint64_t shape_ = 0; // of the passes whose steps were begun in this backward
  bool rooted_ = false;
  bool changed_ = false; // the pass had a call that order_ does not have
  bool outdated_ = false; // parameters have changed since passes were last forgotten
  bool waits_ = true; // one backward through several passes reduces each unit once
  size_t cursor_ = 0; // next event of order_
  UnitId retained_ = -1; // left last; kept for the backward
};

} // namespace zerocore
