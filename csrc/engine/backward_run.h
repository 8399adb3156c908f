// Follows a backward through the model's units: what the hooks on autograd's graph call.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/graph/recomputed_calls.h"
#include "engine/graph/untracked_backward.h"
#include "engine/order_consensus.h"
#include "engine/thread_check.h"
#include "engine/unit_lifecycle.h"

namespace zerocore {

class BackwardRun {
 public:
  // All outlive it.
  BackwardRun(
      const Units& units,
      const UnitContext& context,
      Schedule& schedule,
      Reducer& reducer,
      ThreadCheck& thread_check,
      UnitLifecycle& lifecycle,
      OrderConsensus& consensus);

  void set_owner(std::weak_ptr<void> owner) {
    untracked_.set_owner(owner);
    owner_ = std::move(owner);
  }
  // A backward that reaches the outputs begins; and it goes through the call that gave them.
  // `first`: the first node that the model recorded.
  void expect(const std::vector<at::Tensor>& outputs, uint64_t first);
  void expect(const std::vector<at::Tensor>& outputs, const RecordedCall& recorded, int64_t number);
  UntrackedBackward& untracked() {
    return untracked_;
  }
  RecomputedCalls& recomputed_calls() {
    return recomputed_calls_;
  }

  // A use of the model that only a backward makes; the first one begins it.
  void begin();
  void grad_ready(UnitId unit, int param);
  // A checkpoint is about to make a call of the unit again. Throws if its parameters have changed,
  // or on a thread that runs beside the hooks. Begins the backward.
  void begin_recompute(UnitId unit);
  // The unit's gradients that have come are none of what comes next.
  void forget_fired(UnitId unit);
  // Forgets what has come, in all units.
  void forget_progress();
  // Reduces, outside of backwards, gradients that they have held back. On all ranks.
  void finalize();
  // Drops the backward under way.
  void reset();
  size_t num_shapes() const {
    return rest_by_shape_.size();
  }

 private:
  struct UnitProgress {
    int num_fired = 0;
    int64_t backward = -1; // the one that goes through the unit
    std::vector<uint8_t> fired; // in it, by parameter
    bool changed = false; // trained parameters, since the last forward
  };

  // A hook that does nothing when the owner is gone.
  std::function<void()> while_owned(std::function<void()> run) const;
  void end();
  void pre_backward(const RecordedCall& recorded, int64_t number);
  void note_changes(UnitId unit);
  void go_through(UnitId unit);
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
  ThreadCheck& thread_check_;
  UnitLifecycle& lifecycle_;
  OrderConsensus& consensus_;
  std::weak_ptr<void> owner_;
  UntrackedBackward untracked_;
  RecomputedCalls recomputed_calls_;
  std::exception_ptr untracked_error_; // thrown at the next chance
  std::vector<UnitProgress> progress_; // by unit
  std::unordered_map<uint64_t, bool> rest_by_shape_; // see reduce_rest()
  bool selective_ = false; // the last backward: not for all parameters
};

} // namespace zerocore
