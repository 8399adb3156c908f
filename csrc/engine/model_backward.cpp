// The backward pass of ModelCalls: hooks on autograd's graph call these functions.

#include <ATen/autocast_mode.h>
#include <ATen/core/functional.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "engine/graph/autograd.h"
#include "engine/model_calls.h"

namespace zerocore {

namespace {

constexpr size_t kMaxBackwardShapes = 4096; // a router may cause a new shape in every step

bool uses_autocast_cache(c10::Device device) {
  return at::autocast::is_autocast_enabled(device.type()) &&
      at::autocast::is_autocast_cache_enabled();
}

} // namespace

// `first_node` is the number of the first autograd node that the call recorded.
void ModelCalls::on_backward(
    const std::vector<at::Tensor>& outputs,
    uint64_t first_node,
    std::function<void()> run) {
  on_backward_of(outputs, context_.streams->device(), first_node, while_owned(std::move(run)));
}

std::function<void()> ModelCalls::while_owned(std::function<void()> run) const {
  return [owner = owner_, run = std::move(run)] {
    if (const auto alive = owner.lock()) {
      run();
    }
  };
}

void ModelCalls::begin_backward() {
  thread_check_.check_hook();
  throw_untracked_error();
  if (lifecycle_.in_backward_pass()) {
    return;
  }
  check_not_capturing(context_.streams->device(), "backward went through a sharded model");
  std::shared_ptr<void> running = thread_check_.begin_backward();
  if (context_.control != nullptr) {
    context_.control->begin_backward(running);
  }
  lifecycle_.set_in_backward_pass(true);
  consensus_.finish_pass();
  lifecycle_.invalidate_changed();
  TORCH_CHECK(
      !consensus_.failed(),
      "the forward raised on rank ",
      consensus_.failed().value_or(-1),
      " of the model's ranks, so that rank has no gradients for this backward. All ranks must "
      "skip it; they must agree on that before the backward.");
  for (const auto& unit : units_) {
    unit->follow_whole();
    lifecycle_.trainable().sync(unit->id());
  }
  schedule_.begin_backward();
  untracked_.begin_backward();
  if (consensus_.ranks_differ()) {
    untracked_.keep_watching();
  }
  choose_reduced();
  reducer_.move_seen_grads();
  on_backward_end(while_owned([this, running = std::move(running)]() mutable {
    end_backward();
    running.reset(); // autograd may keep this callback alive
  }));
}

// Excludes a unit from reduction if this backward pass computes no gradient of its parameters
// (torch.autograd.grad, or backward(inputs=...)). Otherwise the unit would reduce zeros.
void ModelCalls::choose_reduced() {
  const bool selective = backward_is_selective();
  if (!selective && !selective_) {
    return;
  }
  selective_ = selective;
  for (const auto& unit : units_) {
    const bool wanted =
        !selective || std::ranges::any_of(unit->params(), [](const UnitParam& param) {
          return param.full.requires_grad() && accumulates_into(param.full);
        });
    schedule_.set_reduced(unit->id(), wanted);
  }
}

void ModelCalls::pre_backward(const RecordedCall& recorded, int64_t number) {
  const UnitId id = recorded.call.unit;
  RECORD_USER_SCOPE("zerocore::pre_backward (" + units_[id]->name() + ")");
  untracked_.announce(number);
  note_changes(id);
  begin_backward();
  end_differentiated(/*all=*/false);
  go_through(id);
  CallHandle call = recorded.call;
  if (recorded.of_backward) {
    call = {-1, -1, id}; // out of turn: the program is that of a first backward
  } else {
    consensus_.go_to_pass(call.pass);
  }
  consensus_.ask_in_backward(call);
  lifecycle_.run([&](Actions& out) {
    if (schedule_.pre_backward(call, out)) {
      forget_fired(id);
    }
  });
  if (schedule_.is_resident(id)) {
    lifecycle_.regather_changed(id);
    lifecycle_.use(id);
  }
  if (c10::GradMode::is_enabled()) {
    const uint64_t thread = at::RecordFunction::currentThreadId();
    differentiated_.push_back({recorded.call, next_node(), 0, thread, /*of_backward=*/true});
  }
}

// With create_graph=True autograd records the backward of a call. These nodes read the unit's
// parameters, too, so they become a range of the call: a second backward gathers the unit when it
// reaches them. A range ends when the unit has been resharded.
void ModelCalls::end_differentiated(bool all) {
  std::erase_if(differentiated_, [&](RecordedCall& recorded) {
    if (!all && schedule_.is_resident(recorded.call.unit)) {
      return false;
    }
    recorded.last = next_node();
    if (recorded.last > recorded.first) {
      untracked_.add(recorded, /*recomputed=*/false);
    }
    return true;
  });
}

// Forgets gradients that fired earlier when a new (perhaps nested) backward pass reaches the unit.
void ModelCalls::go_through(UnitId id) {
  const int64_t backward = current_backward();
  if (std::exchange(progress_[id].backward, backward) != backward) {
    forget_fired(id);
  }
}

// Observers of autograd nodes must not throw. The next hook, or the end of the backward, throws.
void ModelCalls::enter_untracked(const RecordedCall& recorded) noexcept {
  try {
    pre_backward(recorded, -1);
  } catch (...) {
    untracked_error_ = std::current_exception();
  }
}

void ModelCalls::throw_untracked_error() {
  if (untracked_error_ != nullptr) {
    std::rethrow_exception(std::exchange(untracked_error_, nullptr));
  }
}

void ModelCalls::note_changes(UnitId id) {
  if (units_[id]->versions().tell_autograd()) {
    progress_[id].changed = true;
  }
}

// An activation checkpoint is about to recompute a call of the unit. Begins the backward pass if no
// hook has begun it. Autograd does not check the versions of parameters that the checkpoint reads.
void ModelCalls::begin_recompute(UnitId id) {
  TORCH_CHECK(
      runs_node_of(context_.streams->device()),
      "unit '",
      units_[id]->name(),
      "' is called in a backward by a node of another device. Autograd runs it concurrently with "
      "those of ",
      context_.streams->device(),
      ". Return outputs of checkpointed modules on the latter, and move them outside of the "
      "checkpoint; put hooks that call the model on tensors of the latter.");
  begin_backward();
  note_changes(id);
  TORCH_CHECK(
      !progress_[id].changed,
      "backward through unit '",
      units_[id]->name(),
      "': its forward is recomputed, but its parameters were changed after it (by an optimizer "
      "step or a load). Run backward before the step, or run the forward again.");
}

// See Note [Recomputed calls]. A recomputed embedding lookup unshards the unit out of turn.
void ModelCalls::recompute(UnitId id) {
  const auto [position, made] = recomputed_calls_.find(id);
  consensus_.go_to_pass(position.pass);
  lifecycle_.run([&](Actions& out) { schedule_.reach(position, out); });
  const bool in_turn = schedule_.is_next(made) && schedule_.passes().reads(made);
  const CallHandle call = in_turn ? made : CallHandle{-1, -1, id};
  consensus_.ask_in_backward(call);
  calls_.back().again = made;
  lifecycle_.run([&](Actions& out) {
    if (schedule_.recompute(call, out)) {
      forget_fired(id);
    }
  });
}

void ModelCalls::grad_ready(UnitId id, int param) {
  begin_backward();
  UnitProgress& progress = progress_[id];
  // A nested backward pass (a reentrant checkpoint inside the unit) may compute gradients again,
  // after all of the outer one's. The unit is then reduced when the outer pass is past it.
  if (progress.backward == -1) {
    go_through(id);
  }
  if (progress.backward != current_backward()) {
    progress.nests = true;
    return;
  }
  if (!std::exchange(progress.fired[param], 1)) {
    ++progress.num_fired;
  }
  if (!progress.nests && progress.num_fired == lifecycle_.trainable().count(id)) {
    lifecycle_.run([&](Actions& out) { schedule_.ready(id, out); });
  }
}

void ModelCalls::forget_fired(UnitId id) {
  std::fill(progress_[id].fired.begin(), progress_[id].fired.end(), 0);
  progress_[id].num_fired = 0;
}

void ModelCalls::end_backward() {
  throw_untracked_error();
  lifecycle_.run([&](Actions& out) { schedule_.finish_program(out); });
  consensus_.serve_others();
  lifecycle_.run([&](Actions& out) { schedule_.end_backward(out); });
  reduce_rest();
  sum_rest();
  reduce_held_back();
  for (const auto& unit : units_) {
    lifecycle_.writes().save(unit->id()); // units that stay unsharded have unsaved writes
  }
  forget_progress();
  const std::vector<bool> reduced = reducer_.finish();
  end_differentiated(/*all=*/true);
  untracked_.end_backward();
  recomputed_calls_.end_backward();
  lifecycle_.set_in_backward_pass(false);
  consensus_.end_backward();
  run_user_hooks(reduced);
}

// Asks all ranks: another rank may hold gradients of a unit that this rank did not use.
void ModelCalls::finalize_backward() {
  const auto use = this->use();
  consensus_.finish_pass(); // inside another model's backward pass, use() skips it
  const std::vector<bool> held = context_.any_rank(
      c10::fmap(units_, [this](const auto& unit) { return reducer_.holds_back(unit->id()); }));
  for (const auto& unit : units_) {
    if (held[unit->id()]) {
      reducer_.reduce(unit->id());
    }
  }
  run_user_hooks(reducer_.finish());
}

// Reduces gradients that arrived after their unit's reduction: this rank used the unit after its
// turn in the shared order, or outside of calls. One rank alone must not decide on a collective. So
// the ranks ask each other after the first backward pass of each sequence of calls, and after later
// ones if any rank had such gradients.
void ModelCalls::reduce_rest() {
  std::vector<bool> rest = c10::fmap(units_, [this](const auto& unit) {
    return unit->settings().syncs && !reducer_.deferred() && reducer_.has_grads(unit->id());
  });
  bool has_rest = std::find(rest.begin(), rest.end(), true) != rest.end();
  if (context_.collectives != nullptr) {
    if (rest_by_shape_.size() >= kMaxBackwardShapes) {
      rest_by_shape_.clear(); // on all ranks at once
    }
    const auto [known, is_new] = rest_by_shape_.try_emplace(schedule_.shape(), false);
    // The order learns a call when it ends. In a backward inside a call the ranks always ask.
    const bool is_inside = schedule_.in_root_forward() || schedule_.num_entered() > 0;
    if (is_new || known->second || is_inside || consensus_.ranks_differ()) {
      rest = context_.any_rank(rest);
      known->second = known->second || std::find(rest.begin(), rest.end(), true) != rest.end();
      has_rest = known->second;
    }
    TORCH_CHECK(
        !has_rest || known->second || consensus_.ranks_differ(),
        "unit '",
        units_[std::find(rest.begin(), rest.end(), true) - rest.begin()]->name(),
        "': a gradient arrived after those of the unit had been reduced, unlike in earlier calls "
        "of the same modules. ",
        uses_autocast_cache(context_.streams->device())
            ? "The backward runs inside a torch.autocast region, whose cache keeps copies of "
              "weights until the region ends: if it spans several steps, a forward computes "
              "with the weights of an earlier one. Leave the region before the backward, or pass "
              "cache_enabled=False."
            : "If you have just switched on checkpoints around several units, run the step again "
              "on all ranks; if you use full parameters outside of the model's calls, do that "
              "inside `with zerocore.unsharded(model):` up to the end of the backward.");
  }
  for (const auto& unit : units_) {
    if (has_rest && rest[unit->id()]) {
      reducer_.reduce(unit->id());
    }
  }
}

// Adds gradients that arrived between backward passes to this rank's sums. Zero-bubble schedules
// add to the gradients of full parameters. Gradients in the dtype of the sums stay there.
void ModelCalls::sum_rest() {
  for (const auto& unit : units_) {
    if (reducer_.has_more_to_sum(unit->id())) {
      reducer_.reduce(unit->id());
    }
  }
}

// Reduces sums of backward passes without sync in units that this pass did not reach. All ranks
// hold sums of the same units, because they made the same reductions.
void ModelCalls::reduce_held_back() {
  for (const auto& unit : units_) {
    if (schedule_.is_reduced(unit->id()) && reducer_.has_earlier_sums(unit->id())) {
      reducer_.reduce(unit->id());
    }
  }
}

// Runs the users' post-accumulate-grad hooks, which sit on the shards. Autograd does not run them,
// because it accumulates into the full parameters.
void ModelCalls::run_user_hooks(const std::vector<bool>& reduced) {
  for (const auto& unit : units_) {
    for (const UnitParam& param : unit->params()) {
      if (reduced[unit->id()] && gradient_of(seen_leaf(param)).defined()) {
        run_accumulated_hooks(seen_leaf(param));
      }
    }
  }
}

void ModelCalls::forget_progress() {
  for (const auto& unit : units_) {
    forget_fired(unit->id());
    progress_[unit->id()].backward = -1;
    progress_[unit->id()].changed = false;
    lifecycle_.update_registration(unit->id());
  }
}

} // namespace zerocore
