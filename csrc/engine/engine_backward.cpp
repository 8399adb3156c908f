// The backward half of the engine: what the autograd hooks call.
#include <algorithm>
#include <utility>

#include "engine/autograd.h"
#include "engine/engine.h"

namespace zerocore {

void Engine::begin_backward() {
  thread_check_.check_hook();
  if (std::exchange(backward_, true)) {
    return;
  }
  schedule_.begin_backward();
  on_backward_end([weak = weak_from_this(), running = thread_check_.begin_backward()] {
    if (const auto engine = weak.lock()) {
      engine->end_backward();
    }
  });
}

void Engine::pre_backward(const CallHandle& call, int64_t version) {
  Unit& unit = *units_[call.unit];
  TORCH_CHECK(
      unit.version() == version,
      "backward through unit '",
      unit.name(),
      "': its parameters were changed after the forward (by an optimizer step or a load). Run "
      "backward before the step, or run the forward again.");
  begin_backward();
  progress_[call.unit].backward = current_backward();
  if (schedule_.pre_backward(call, actions_)) {
    forget_fired(call.unit);
  }
  run(actions_);
  use(call.unit);
}

void Engine::grad_ready(UnitId id, int param) {
  begin_backward();
  UnitProgress& progress = progress_[id];
  if (!std::exchange(progress.fired[param], 1)) {
    ++progress.num_fired;
  }
  // In a backward within the one that goes through the unit (reentrant checkpoints inside of it)
  // gradients may come again: the unit is reduced when the outer backward leaves it.
  const bool inner = progress.backward != -1 && progress.backward != current_backward();
  // The gradient of the unit's input may still need frozen parameters: released when left, too.
  const bool needed = context_.policy.shards_parameters() &&
      progress.num_trainable < static_cast<int>(progress.fired.size());
  if (progress.num_fired == progress.num_trainable && !inner && !needed) {
    schedule_.ready(id, actions_);
    run(actions_);
  }
}

void Engine::forget_fired(UnitId id) {
  std::fill(progress_[id].fired.begin(), progress_[id].fired.end(), 0);
  progress_[id].num_fired = 0;
}

void Engine::end_backward() {
  schedule_.end_backward(actions_);
  run(actions_);
  for (UnitId id = 0; id < num_units(); ++id) {
    if (reducer_.has_grads(id)) {
      reducer_.reduce(id, sync_);
    }
    forget_fired(id);
    progress_[id].backward = -1;
    update_registration(id);
  }
  reducer_.finish();
  backward_ = false;
}

} // namespace zerocore
