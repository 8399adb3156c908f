// The backward half of the schedule: walks the step list of the pass that runs backward.
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
// output. So no step of a call is done before the backward is there.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/forward_passes.h"
#include "plan/residency.h"

namespace zerocore {

// How far a backward has come: it has left the calls of the pass that are numbered `end` and more.
struct BackwardPlace {
  int64_t pass = -1; // -1 if it is not known
  int32_t end = 0;
};

class BackwardWalk {
 public:
  // Both outlive it.
  BackwardWalk(int num_units, int prefetch, ForwardPasses& passes, Residency& residency)
      : prefetch_(prefetch), passes_(passes), residency_(residency), units_(num_units) {}

  void begin();
  // True when this is the first news of the call's backward.
  bool pre_backward(const CallHandle& call, Actions& out);
  // A call is made again in the backward (activation checkpointing). See Note [Recomputed calls].
  // Comes to where the backward is: does the steps of calls that it has left.
  void reach(const BackwardPlace& place, Actions& out);
  // Whether the call's backward is what comes next in the order.
  bool is_next(const CallHandle& call) const;
  // True as pre_backward; a call that is not next in the order has none here (pass -1).
  bool recompute(const CallHandle& call, Actions& out);
  // All gradients of the unit exist. One that is released is reduced when the backward has left it.
  void ready(UnitId unit, Actions& out);
  void end(Actions& out);
  // Whether pre_backward is going to unshard the unit out of turn.
  bool is_out_of_turn(const CallHandle& call) const;
  // Does the rest of the backward's steps; gradients still to come are reduced at its end.
  void finish_steps(Actions& out);
  // As finish_steps, in the midst of a backward: what it uses stays on this rank.
  void leave_order(Actions& out);
  // The backward ended with an exception.
  void abort();

  // Whether the backward that begins leaves the unit's gradients alone; until the next one begins.
  void set_muted(UnitId unit, bool muted) {
    units_.at(unit).muted = muted;
  }
  // A number for the calls whose backward has begun, the same on all ranks; of the last backward.
  uint64_t shape() const {
    return shape_;
  }

 private:
  struct UnitState {
    int32_t call = -1; // whose backward began last
    bool ready = false; // that call is
    bool muted = false; // in this backward
    bool due = false; // to be reduced in this backward, at its end at the latest
  };

  std::vector<bool> reduced_later(const ForwardPass& pass) const;
  void start_steps(ForwardPass& pass, Actions& out);
  void go_to_pass(ForwardPass& pass, Actions& out);
  void do_step(const BackwardStep& step, Actions& out);
  void run_steps(ForwardPass& pass, size_t end, Actions& out);
  void run_gathers(Actions& out);
  bool gathered_next(UnitId unit) const;

  int prefetch_;
  ForwardPasses& passes_;
  Residency& residency_;
  std::vector<UnitState> units_;
  int64_t pass_ = -1; // id of the pass whose steps are being done
  uint64_t shape_ = 0; // of the passes whose steps were begun in this backward
  bool waits_ = true; // one backward through several passes reduces each unit once
};

} // namespace zerocore
