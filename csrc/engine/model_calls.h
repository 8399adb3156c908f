// Follows a model's forward and backward pass, as hooks on its modules and on autograd's graph
// report them.
//
// One thread at a time may call a model; a second one gets an error. The backward pass may run on
// another thread. enter/exit bracket a unit's call; begin_pass/end_pass bracket the root forward.
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
// `fail_pass` and `reset` lead from each state to the first one. `enter` and `exit` are FSDP2's
// pre_forward and post_forward:
//   enter         enter_forward: the schedule runs its program up to this call. It unshards and
//                 reshards each unit that this rank skips, as the ranks that call it do;
//   prefetch      Schedule::do_enter: starts the all-gathers of the unit and of the next ones;
//   wait          UnitLifecycle::use: the compute stream waits for the unit's all-gather;
//   compute       the module's own forward;
//   leave         leave_forward: Schedule::do_exit reshards the unit.
// In a backward pass, `pre_backward` and `grad_ready` tell the schedule autograd's position. The
// schedule then runs the backward's program up to that position.
//
// Note [Calls and resets]
// A reset may come while calls run: a backward pass inside a forward fails, or the user calls
// zerocore.reset there. The reset drops those calls, but Python still ends each of them. So a
// dropped call stays on the stack until Python ends it, which only pops it. Each enter and
// begin_pass that returned has one matching end; one that threw has no end.
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

// The stack of calls of one model, and its progress through a backward pass.
class ModelCalls {
 public:
  // All arguments must outlive the object.
  ModelCalls(
      const Units& units,
      const UnitContext& context,
      Schedule& schedule,
      Reducer& reducer,
      UnitLifecycle& lifecycle,
      OrderConsensus& consensus);

  // Hooks on autograd's graph do nothing once the owner (the engine) has been destroyed.
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
  // See Schedule::exit for `keep` and `reads`.
  void exit(
      UnitId unit,
      const std::vector<at::Tensor>& outputs,
      bool keep = false,
      bool reads = true);
  // Enters a unit whose parameter is read without a call of its module. The unit belongs to the
  // innermost running call until that call ends.
  void adopt(UnitId unit);
  bool has_calls() const {
    return !calls_.empty();
  }
  // Returns whether reads of parameters belong to a running call. Reads by an optimizer's step
  // inside a call do not: the step works with shards. The step's closure may call the model again.
  bool in_call() const {
    return calls_.size() > (steps_.empty() ? 0 : steps_.back());
  }
  // Bracket an optimizer's step inside a call.
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
  // Resets the model if a backward pass through it ended with an exception.
  void fail_backward();
  // Reduces the local sums of backward passes without sync. Collective.
  void finalize_backward();
  size_t num_backward_shapes() const {
    return rest_by_shape_.size();
  }

  // -- forward and backward
  // Begins a use of units outside the model's calls. Cleans up after a failed call and finishes the
  // last pass with the other ranks. When the result is destroyed, any thread may use the model.
  [[nodiscard]] auto use(bool may_be_parked = false) {
    recover("a sharded model was used", may_be_parked);
    return c10::make_scope_exit([this] { leave_if_outside(); });
  }
  void check_not_parked() const;
  void set_parked(bool parked) {
    parked_ = parked;
  }
  // Drops all unfinished work: gathers, graphs waiting for a backward, unreduced gradients.
  void reset();

 private:
  struct Call {
    bool recomputing = false; // an activation checkpoint recomputes it
    uint64_t first_node = 0; // number of the first autograd node that the call records
    bool has_graph = false; // grad mode was on when the call began
    UnitId adopted = -1; // the adopted unit; the enclosing call exits it, see adopt()
    CallHandle again = {}; // the call that a recompute repeats; its pass is -1 if unknown
    size_t depth = 0; // number of enclosing calls that the schedule knows
    std::thread::id thread = std::this_thread::get_id(); // the thread that made the call
    bool dropped = false; // a reset dropped the call; see Note [Calls and resets]
  };
  struct UnitProgress {
    int num_fired = 0;
    int64_t backward = -1; // the backward pass that uses the unit
    std::vector<uint8_t> fired; // by parameter: its gradient has arrived in this backward pass
    bool changed = false; // trained parameters have changed since the last forward
    bool nests = false; // nested backward passes inside the unit have computed gradients
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
  void end_differentiated(bool all);
  void note_changes(UnitId unit);
  void go_through(UnitId unit);
  void forget_fired(UnitId unit);
  void forget_progress();
  void enter_untracked(const RecordedCall& recorded) noexcept;
  void throw_untracked_error();
  void choose_reduced();
  void reduce_rest();
  void sum_rest();
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
  bool parked_ = false; // only begin_hold and reshard of Engine may use units
  std::vector<Call> calls_; // entered and not ended
  std::vector<size_t> steps_; // running optimizer steps: the number of calls around each
  std::exception_ptr refused_; // saving the writes of a call failed; the end of the call throws it
  UntrackedBackward untracked_;
  std::vector<RecordedCall> differentiated_; // calls whose running backward autograd records
  RecomputedCalls recomputed_calls_;
  std::exception_ptr untracked_error_; // the next hook, or the end of the backward, throws it
  std::vector<UnitProgress> progress_; // by unit
  std::unordered_map<uint64_t, bool> rest_by_shape_; // see reduce_rest()
  bool selective_ = false; // the last backward pass computed some gradients only
};

} // namespace zerocore
