// Follows a model's forward and its backward: the calls of the model and of its units, and what the
// hooks on autograd's graph tell.
//
// Calls come from one thread at a time (backward may run on another one); others get an error.
// enter/exit bracket a module call; begin_pass/end_pass bracket a call of the sharded model.
//
// Note [The states of a pass]
//
//             begin_pass            end_pass                finish_pass
//   outside ------------> in a pass ---------> left by this ------------> left by all
//      ^                    ^   |                  rank                       |
//      |               exit |   | enter                         a hook on an  |
//      |                    |   v                               output runs   v
//      |                   in a call                                      backward
//      |                                                                      |
//      +----------------------------------------------------------------------+
//                                    end_backward
//
// `fail_pass` and `reset` lead from each state to the first one. FSDP2's pre_forward and
// post_forward are `enter` and `exit`:
//   enter         enter_forward: the schedule runs its program up to this call, and what it skips
//                 on the way is gathered and resharded as on the ranks that call it;
//   gather ahead  Schedule::do_enter: the unit, and those of the next calls;
//   wait          UnitLifecycle::use: the compute stream is behind the unit's gather;
//   compute       the module's own forward;
//   leave         leave_forward, from which Schedule::do_exit reshards.
// In a backward `pre_backward` and `grad_ready` tell the schedule how far autograd has come, and
// the schedule runs the program of the backward up to there.
//
// Note [Calls and resets]
// A reset may come while calls run: a backward inside of a forward fails, or the program calls
// zerocore.reset there. The reset drops those calls, but Python still ends each of them. So a
// dropped call stays on the stack until its end, which pops it and does nothing else. Each enter
// and begin_pass that returned has one end, and one that threw has none.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ScopeExit.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/graph/recomputed_calls.h"
#include "engine/graph/untracked_backward.h"
#include "engine/order_consensus.h"
#include "engine/thread_check.h"
#include "engine/unit_lifecycle.h"

namespace zerocore {

class ModelCalls {
 public:
  // All outlive it.
  ModelCalls(
      const Units& units,
      const UnitContext& context,
      Schedule& schedule,
      Reducer& reducer,
      UnitLifecycle& lifecycle,
      OrderConsensus& consensus);

  // Hooks on the graph do nothing when the owner is gone.
  void set_owner(std::weak_ptr<void> owner) {
    untracked_.set_owner(owner);
    owner_ = std::move(owner);
  }
  ThreadCheck& thread_check() {
    return thread_check_;
  }

  // -- forward
  void begin_pass();
  void end_pass(const std::vector<at::Tensor>& outputs);
  void fail_pass();
  void enter(UnitId unit);
  // `keep`, `reads`: see Schedule::exit.
  void exit(
      UnitId unit,
      const std::vector<at::Tensor>& outputs,
      bool keep = false,
      bool reads = true);
  // A parameter of a unit that was not entered is read: the innermost call that runs owns
  // the unit from here to its end.
  void adopt(UnitId unit);
  bool has_calls() const {
    return !calls_.empty();
  }
  // Whether reads of parameters belong to a call: not in an optimizer's step inside of one, which
  // works with shards as it does outside. A closure of the step may call the model again.
  bool in_call() const {
    return calls_.size() > (steps_.empty() ? 0 : steps_.back());
  }
  // Around an optimizer's step inside of a call.
  void begin_step() {
    if (has_calls()) {
      steps_.push_back(calls_.size());
    }
  }
  void end_step() {
    if (!steps_.empty() && steps_.back() == calls_.size()) {
      steps_.pop_back();
    }
  }

  // -- backward
  void grad_ready(UnitId unit, int param);
  // The call of a backward ended with an exception: as reset() if it came through this model.
  void fail_backward();
  // Reduces, outside of backwards, gradients that they have held back. On all ranks.
  void finalize_backward();
  size_t num_backward_shapes() const {
    return rest_by_shape_.size();
  }

  // -- around both
  // A use of units that is no call of the model: nothing of an exception is left, and no rank waits
  // for this one. Any thread may be next when the result ends.
  [[nodiscard]] auto use(bool may_be_parked = false) {
    recover("a sharded model was used", may_be_parked);
    return c10::make_scope_exit([this] { leave_if_outside(); });
  }
  void check_not_parked() const;
  void set_parked(bool parked) {
    parked_ = parked;
  }
  // Drops everything in flight: gathers, graphs waiting for a backward, unreduced gradients.
  void reset();

 private:
  struct Call {
    bool recomputing = false; // in a recompute, not a forward
    uint64_t first_node = 0; // of the graph that the call records
    bool has_graph = false; // grad mode was on at its beginning
    UnitId adopted = -1; // the unit, if it is left with the call that is around this one
    CallHandle again = {}; // that a recompute makes once more; of pass -1 if it is not known
    size_t depth = 0; // calls around it that the schedule knows
    std::thread::id thread = std::this_thread::get_id(); // that made it
    bool dropped = false; // by a reset; see Note [Calls and resets]
  };
  struct UnitProgress {
    int num_fired = 0;
    int64_t backward = -1; // the one that goes through the unit
    std::vector<uint8_t> fired; // in it, by parameter
    bool changed = false; // trained parameters, since the last forward
  };

  void recover(const char* what, bool may_be_parked = false);
  void leave_if_outside();

  // -- forward
  void start_pass();
  void enter_forward(UnitId unit);
  void leave_adopted(const std::vector<at::Tensor>& outputs);
  void leave(UnitId unit, const std::vector<at::Tensor>& outputs, bool keep, bool reads);
  void leave_forward(RecordedCall& recorded, bool has_output, bool reads, bool keep);
  int64_t note_call(const RecordedCall& recorded, const Call& entered);

  // -- the stack of calls
  size_t push_call(Call call);
  std::optional<size_t> innermost() const;
  Call pop_call();
  void end_calls(size_t num);
  void drop_calls();
  template <typename Run>
  void run_in(size_t call, const Run& run);
  void abandon(size_t call, size_t depth);

  // -- backward
  void on_backward(
      const std::vector<at::Tensor>& outputs,
      uint64_t first_node,
      std::function<void()> run);
  std::function<void()> while_owned(std::function<void()> run) const;
  void begin_backward();
  void end_backward();
  void pre_backward(const RecordedCall& recorded, int64_t number);
  void begin_recompute(UnitId unit);
  void recompute(UnitId unit);
  void note_changes(UnitId unit);
  void go_through(UnitId unit);
  void forget_fired(UnitId unit);
  void forget_progress();
  void enter_untracked(const RecordedCall& recorded) noexcept;
  void throw_untracked_error();
  void choose_reduced();
  void reduce_rest();
  void reduce_held_back();
  void run_user_hooks(const std::vector<bool>& reduced);

  const Units& units_;
  const UnitContext& context_;
  Schedule& schedule_;
  Reducer& reducer_;
  UnitLifecycle& lifecycle_;
  OrderConsensus& consensus_;
  ThreadCheck thread_check_;
  std::weak_ptr<void> owner_;
  bool parked_ = false; // no use of units but Engine::begin_hold
  std::vector<Call> calls_; // entered and not left
  std::vector<size_t> steps_; // under way, by the number of calls around each
  std::exception_ptr refused_; // a call has left its parameters in no order; its end raises it
  UntrackedBackward untracked_;
  RecomputedCalls recomputed_calls_;
  std::exception_ptr untracked_error_; // thrown at the next chance
  std::vector<UnitProgress> progress_; // by unit
  std::unordered_map<uint64_t, bool> rest_by_shape_; // see reduce_rest()
  bool selective_ = false; // the last backward: not for all parameters
};

} // namespace zerocore
