// The backward half of the engine: what the autograd hooks call.
#include <algorithm>
#include <utility>

#include "engine/autograd.h"
#include "engine/engine.h"

namespace zerocore {

namespace {

constexpr size_t kMaxBackwardShapes = 4096; // routers may make a new one in every step

} // namespace

void Engine::begin_backward() {
  thread_check_.check_hook();
  throw_side_door_error();
  if (std::exchange(backward_, true)) {
    return;
  }
  settle_pass();
  TORCH_CHECK(
      !failed_,
      "the forward raised on rank ",
      failed_.value_or(-1),
      " of the model's ranks, so there is nothing to average this backward with. All ranks must "
      "skip it: let them agree on that before the backward.");
  schedule_.begin_backward();
  side_doors_.begin_backward();
  mute_units();
  on_backward_end([weak = weak_from_this(), running = thread_check_.begin_backward()] {
    if (const auto engine = weak.lock()) {
      engine->end_backward();
    }
  });
}

// A backward for other gradients than the unit's (of inputs, or of chosen parameters) must not be
// taken for one in which its gradients are zero.
void Engine::mute_units() {
  const bool selective = backward_is_selective();
  if (!selective && !muted_) {
    return;
  }
  muted_ = selective;
  for (UnitId id = 0; id < num_units(); ++id) {
    const auto& params = units_[id]->params();
    const bool wanted = std::any_of(params.begin(), params.end(), [](const UnitParam& param) {
      return param.full.requires_grad() && accumulates_into(param.full);
    });
    schedule_.set_muted(id, !wanted);
  }
}

void Engine::pre_backward(const RecordedCall& recorded, int64_t number) {
  const UnitId id = recorded.call.unit;
  side_doors_.announce(number);
  check_versions(recorded);
  TORCH_CHECK(
      !c10::GradMode::is_enabled() || !context_.policy.shards_parameters() ||
          schedule_.is_held_unsharded(id),
      "backward with create_graph=True through unit '",
      units_[id]->name(),
      "': a second backward would need parameters that stage 3 has given back by then. Use stage 2 "
      "or lower, or run forward and both backwards inside `with zerocore.unsharded(model):`.");
  begin_backward();
  progress_[id].backward = current_backward();
  ask_in_backward(recorded.call);
  if (schedule_.pre_backward(recorded.call, actions_)) {
    forget_fired(id);
  }
  run(actions_);
  use(id);
}

// Observers of nodes must not throw; the hook that comes next does, or the end of the backward.
void Engine::enter_by_side_door(const RecordedCall& recorded) noexcept {
  try {
    pre_backward(recorded, -1);
  } catch (...) {
    side_door_error_ = std::current_exception();
  }
}

void Engine::throw_side_door_error() {
  if (side_door_error_ != nullptr) {
    std::rethrow_exception(std::exchange(side_door_error_, nullptr));
  }
}

// Parameters that changed after the forward must not take part in its backward. What was trained
// and has a gradient to come is refused when that comes: a unit may hold parameters of several
// modules, of which one was stepped and another is not yet.
void Engine::check_versions(const RecordedCall& recorded) {
  Unit& unit = *units_[recorded.call.unit];
  if (unit.version() == recorded.version) {
    return;
  }
  const auto changed = unit.versions().changed_since(recorded.version);
  const bool is_known =
      changed.has_value() && std::all_of(changed->begin(), changed->end(), [&](int param) {
        return unit.params()[param].full.requires_grad();
      });
  TORCH_CHECK(
      is_known,
      "backward through unit '",
      unit.name(),
      "': its parameters were changed after the forward (by an optimizer step or a load). Run "
      "backward before the step, or run the forward again.");
  std::vector<uint8_t>& outdated = progress_[recorded.call.unit].outdated;
  outdated.assign(unit.params().size(), 0);
  for (const int param : *changed) {
    outdated[param] = 1;
  }
}

void Engine::grad_ready(UnitId id, int param) {
  begin_backward();
  UnitProgress& progress = progress_[id];
  TORCH_CHECK(
      progress.outdated.empty() || !progress.outdated[param],
      "backward through parameter '",
      units_[id]->params()[param].spec.fqn,
      "' of unit '",
      units_[id]->name(),
      "': it was changed after the forward (by an optimizer step or a load). Run backward before "
      "the step, or run the forward again.");
  // In a backward within the one that goes through the unit (reentrant checkpoints inside of it)
  // gradients may come again: the unit is reduced when the outer backward leaves it.
  if (progress.backward != -1 && progress.backward != current_backward()) {
    return;
  }
  if (!std::exchange(progress.fired[param], 1)) {
    ++progress.num_fired;
  }
  // The gradient of the unit's input may still need frozen parameters: released when left, too.
  const bool needed = context_.policy.shards_parameters() &&
      progress.num_trainable < static_cast<int>(progress.fired.size());
  if (progress.num_fired == progress.num_trainable && !needed) {
    schedule_.ready(id, actions_);
    run(actions_);
  }
}

// Whether the rest of the unit's backward needs no parameters any more.
bool Engine::is_done(UnitId id) const {
  const UnitProgress& progress = progress_[id];
  return progress.num_trainable > 0 && progress.num_fired == progress.num_trainable &&
      progress.backward == current_backward();
}

void Engine::forget_fired(UnitId id) {
  std::fill(progress_[id].fired.begin(), progress_[id].fired.end(), 0);
  progress_[id].num_fired = 0;
}

void Engine::end_backward() {
  throw_side_door_error();
  schedule_.finish_steps(actions_);
  run(actions_);
  serve_others();
  schedule_.end_backward(actions_);
  run(actions_);
  reduce_rest();
  for (UnitId id = 0; id < num_units(); ++id) {
    forget_fired(id);
    progress_[id].backward = -1;
    progress_[id].outdated.clear();
    update_registration(id);
  }
  const std::vector<bool> reduced = reducer_.reduced();
  reducer_.finish();
  side_doors_.end_backward();
  backward_ = false;
  ranks_differ_ = false;
  run_user_hooks(reduced);
}

void Engine::fail_backward() {
  if (backward_ && !in_backward()) { // one within another one fails with it
    thread_check_.check_no_backward();
    reset();
  }
}

// Gradients that came when the calls said that there are no more: one checkpoint around several
// units recomputes the first of them first, from which follows that the others are done with. What
// ranks reduce must not depend on the gradients of one, so they ask each other after the first
// backward of each sequence of calls, which is the same on all ranks, and from then on if there
// were such gradients.
void Engine::reduce_rest() {
  std::vector<bool> rest;
  for (UnitId id = 0; id < num_units(); ++id) {
    rest.push_back(reducer_.has_grads(id));
  }
  bool has_rest = std::find(rest.begin(), rest.end(), true) != rest.end();
  if (context_.collectives != nullptr) {
    if (rest_by_shape_.size() >= kMaxBackwardShapes) {
      rest_by_shape_.clear(); // on all ranks at once
    }
    const auto [known, is_new] = rest_by_shape_.try_emplace(schedule_.backward_shape(), false);
    if (is_new || known->second || ranks_differ_) {
      rest = context_.any_rank(rest);
      known->second = known->second || std::find(rest.begin(), rest.end(), true) != rest.end();
      has_rest = known->second;
    }
    check_rest(rest, has_rest && !known->second && !ranks_differ_);
  }
  for (UnitId id = 0; has_rest && id < num_units(); ++id) {
    if (rest[id]) {
      reducer_.reduce(id, sync_);
    }
  }
}

void Engine::check_rest(const std::vector<bool>& rest, bool is_unexpected) const {
  const auto unit = std::find(rest.begin(), rest.end(), true) - rest.begin();
  TORCH_CHECK(
      !is_unexpected,
      "unit '",
      is_unexpected ? units_[unit]->name() : "",
      "': a gradient came after those of the unit had been reduced, which was not so when the same "
      "modules were called before. If checkpoints around several units were switched on, run the "
      "step again on all ranks; if full parameters were used outside of calls of the model, do "
      "that "
      "inside of `with zerocore.unsharded(model):` up to the end of the backward.");
}

// Users register hooks on the shards, which is where optimizers look; gradients come to be there
// without autograd.
void Engine::run_user_hooks(const std::vector<bool>& reduced) {
  for (UnitId id = 0; id < num_units(); ++id) {
    for (const UnitParam& param : units_[id]->params()) {
      if (reduced[id] && gradient_of(param.shard).defined()) {
        run_accumulated_hooks(param.shard);
      }
    }
  }
}

} // namespace zerocore
