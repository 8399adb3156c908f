// Follows a backward through the model's units.
#include "engine/backward_run.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "engine/graph/autograd.h"

namespace zerocore {

namespace {

constexpr size_t kMaxBackwardShapes = 4096; // routers may make a new one in every step

} // namespace

BackwardRun::BackwardRun(EngineParts& parts, UnitLifecycle& lifecycle, OrderConsensus& consensus)
    : parts_(parts),
      lifecycle_(lifecycle),
      consensus_(consensus),
      untracked_(
          [this](const RecordedCall& recorded) { enter_untracked(recorded); },
          [this](const CallHandle& call) {
            return is_done(call.unit) || parts_.schedule.is_resident(call.unit) ||
                !parts_.schedule.reads(call);
          }) {
  for (const auto& unit : parts.units) {
    progress_.push_back({0, -1, std::vector<uint8_t>(unit->params().size(), 0)});
  }
}

void BackwardRun::expect(const std::vector<at::Tensor>& outputs) {
  on_backward_of(outputs, [this, owner = owner_] {
    if (const auto alive = owner.lock()) {
      begin();
    }
  });
}

void BackwardRun::expect(
    const std::vector<at::Tensor>& outputs,
    const RecordedCall& recorded,
    int64_t number) {
  on_backward_of(outputs, [this, owner = owner_, recorded, number] {
    if (const auto alive = owner.lock()) {
      pre_backward(recorded, number);
    }
  });
}

void BackwardRun::begin() {
  parts_.thread_check.check_hook();
  throw_untracked_error();
  if (std::exchange(parts_.backward, true)) {
    return;
  }
  consensus_.settle_pass();
  TORCH_CHECK(
      !consensus_.failed(),
      "the forward raised on rank ",
      consensus_.failed().value_or(-1),
      " of the model's ranks, so there is nothing to average this backward with. All ranks must "
      "skip it: let them agree on that before the backward.");
  for (UnitId id = 0; id < parts_.num_units(); ++id) {
    lifecycle_.sync_requires_grad(id);
  }
  parts_.schedule.begin_backward();
  untracked_.begin_backward();
  if (consensus_.ranks_differ()) {
    untracked_.keep_watching();
  }
  mute_units();
  on_backward_end([this, owner = owner_, running = parts_.thread_check.begin_backward()] {
    if (const auto alive = owner.lock()) {
      end();
    }
  });
}

// A backward for other gradients than the unit's (of inputs, or of chosen parameters) must not be
// taken for one in which its gradients are zero.
void BackwardRun::mute_units() {
  const bool selective = backward_is_selective();
  if (!selective && !muted_) {
    return;
  }
  muted_ = selective;
  for (UnitId id = 0; id < parts_.num_units(); ++id) {
    const auto& params = parts_.units[id]->params();
    const bool wanted = std::any_of(params.begin(), params.end(), [](const UnitParam& param) {
      return param.full.requires_grad() && accumulates_into(param.full);
    });
    parts_.schedule.set_muted(id, !wanted);
  }
}

void BackwardRun::pre_backward(const RecordedCall& recorded, int64_t number) {
  const UnitId id = recorded.call.unit;
  untracked_.announce(number);
  note_changes(id);
  TORCH_CHECK(
      !c10::GradMode::is_enabled() || !parts_.context.mesh.shards_parameters() ||
          parts_.schedule.is_held_unsharded(id),
      "backward with create_graph=True through unit '",
      parts_.units[id]->name(),
      "': a second backward would need parameters that stage 3 has given back by then. Use stage 2 "
      "or lower, or run forward and both backwards inside `with zerocore.unsharded(model):`.");
  begin();
  go_through(id);
  consensus_.ask_in_backward(recorded.call);
  if (parts_.schedule.pre_backward(recorded.call, parts_.actions)) {
    forget_fired(id);
  }
  lifecycle_.run(parts_.actions);
  if (parts_.schedule.is_here(id)) {
    lifecycle_.use(id);
  }
}

// Of a backward within another one all gradients of the unit come, so none that came before count.
void BackwardRun::go_through(UnitId id) {
  const int64_t backward = current_backward();
  if (std::exchange(progress_[id].backward, backward) != backward) {
    forget_fired(id);
  }
}

// Observers of nodes must not throw; the hook that comes next does, or the end of the backward.
void BackwardRun::enter_untracked(const RecordedCall& recorded) noexcept {
  try {
    pre_backward(recorded, -1);
  } catch (...) {
    untracked_error_ = std::current_exception();
  }
}

void BackwardRun::throw_untracked_error() {
  if (untracked_error_ != nullptr) {
    std::rethrow_exception(std::exchange(untracked_error_, nullptr));
  }
}

// See Note [Changes between a forward and its backward].
void BackwardRun::note_changes(UnitId id) {
  if (parts_.units[id]->versions().tell_autograd()) {
    progress_[id].changed = true;
  }
}

// Autograd asks nothing of what a checkpoint reads again, and nobody has gathered it since.
void BackwardRun::check_recompute(UnitId id) {
  note_changes(id);
  TORCH_CHECK(
      !progress_[id].changed,
      "backward through unit '",
      parts_.units[id]->name(),
      "': its forward is made again, but its parameters were changed after it (by an optimizer "
      "step or a load). Run backward before the step, or run the forward again.");
}

void BackwardRun::grad_ready(UnitId id, int param) {
  begin();
  UnitProgress& progress = progress_[id];
  // In a backward within the one that goes through the unit (reentrant checkpoints inside of it)
  // gradients may come again: the unit is reduced when the outer backward leaves it.
  if (progress.backward == -1) {
    go_through(id);
  }
  if (progress.backward != current_backward()) {
    return;
  }
  if (!std::exchange(progress.fired[param], 1)) {
    ++progress.num_fired;
  }
  // The gradient of the unit's input may still need frozen parameters: released when left, too.
  const bool needed = parts_.context.mesh.shards_parameters() &&
      lifecycle_.num_trainable(id) < static_cast<int>(progress.fired.size());
  if (progress.num_fired == lifecycle_.num_trainable(id) && !needed) {
    parts_.schedule.ready(id, parts_.actions);
    lifecycle_.run(parts_.actions);
  }
}

// Whether the rest of the unit's backward needs no parameters any more.
bool BackwardRun::is_done(UnitId id) const {
  const UnitProgress& progress = progress_[id];
  return lifecycle_.num_trainable(id) > 0 && progress.num_fired == lifecycle_.num_trainable(id) &&
      progress.backward == current_backward();
}

void BackwardRun::forget_fired(UnitId id) {
  std::fill(progress_[id].fired.begin(), progress_[id].fired.end(), 0);
  progress_[id].num_fired = 0;
}

void BackwardRun::end() {
  throw_untracked_error();
  parts_.schedule.finish_steps(parts_.actions);
  lifecycle_.run(parts_.actions);
  consensus_.serve_others();
  parts_.schedule.end_backward(parts_.actions);
  lifecycle_.run(parts_.actions);
  reduce_rest();
  forget_progress();
  const std::vector<bool> reduced = parts_.reducer.reduced();
  parts_.reducer.finish();
  untracked_.end_backward();
  recomputed_calls_.end_backward();
  parts_.backward = false;
  consensus_.end_backward();
  run_user_hooks(reduced);
}

// Gradients that came when the calls said that there are no more: of a unit that this rank used
// when the order of all ranks had left it, or that is used outside of calls. The reductions
// must not depend on one rank's gradients, so ranks ask each other after the first backward of each
// sequence of calls, which is the same on all ranks, and from then on if there were such gradients.
void BackwardRun::reduce_rest() {
  std::vector<bool> rest;
  for (UnitId id = 0; id < parts_.num_units(); ++id) {
    rest.push_back(parts_.reducer.has_grads(id));
  }
  bool has_rest = std::find(rest.begin(), rest.end(), true) != rest.end();
  if (parts_.context.collectives != nullptr) {
    if (rest_by_shape_.size() >= kMaxBackwardShapes) {
      rest_by_shape_.clear(); // on all ranks at once
    }
    const auto [known, is_new] =
        rest_by_shape_.try_emplace(parts_.schedule.backward_shape(), false);
    if (is_new || known->second || consensus_.ranks_differ()) {
      rest = parts_.context.any_rank(rest);
      known->second = known->second || std::find(rest.begin(), rest.end(), true) != rest.end();
      has_rest = known->second;
    }
    check_rest(rest, has_rest && !known->second && !consensus_.ranks_differ());
  }
  for (UnitId id = 0; has_rest && id < parts_.num_units(); ++id) {
    if (rest[id]) {
      parts_.reducer.reduce(id, parts_.sync && parts_.units[id]->settings().syncs);
    }
  }
}

void BackwardRun::check_rest(const std::vector<bool>& rest, bool is_unexpected) const {
  const auto unit = std::find(rest.begin(), rest.end(), true) - rest.begin();
  TORCH_CHECK(
      !is_unexpected,
      "unit '",
      is_unexpected ? parts_.units[unit]->name() : "",
      "': a gradient came after those of the unit had been reduced, which was not so when the same "
      "modules were called before. If checkpoints around several units were switched on, run the "
      "step again on all ranks; if full parameters were used outside of calls of the model, do "
      "that "
      "inside of `with zerocore.unsharded(model):` up to the end of the backward.");
}

// Users register hooks on the shards, which is where optimizers look; gradients come to be there
// without autograd.
void BackwardRun::run_user_hooks(const std::vector<bool>& reduced) {
  for (UnitId id = 0; id < parts_.num_units(); ++id) {
    for (const UnitParam& param : parts_.units[id]->params()) {
      if (reduced[id] && gradient_of(param.shard).defined()) {
        run_accumulated_hooks(param.shard);
      }
    }
  }
}

void BackwardRun::forget_progress() {
  for (UnitId id = 0; id < parts_.num_units(); ++id) {
    forget_fired(id);
    progress_[id].backward = -1;
    progress_[id].changed = false;
    lifecycle_.update_registration(id);
  }
}

void BackwardRun::reset() {
  parts_.backward = false;
  untracked_error_ = nullptr;
  rest_by_shape_.clear();
  untracked_.reset();
  recomputed_calls_.reset();
}

} // namespace zerocore
