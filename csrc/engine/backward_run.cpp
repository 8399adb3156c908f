// Follows a backward through the model's units.
#include "engine/backward_run.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/functional.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "engine/graph/autograd.h"

namespace zerocore {

namespace {

constexpr size_t kMaxBackwardShapes = 4096; // routers may make a new one in every step

bool uses_autocast_cache(c10::Device device) {
  return at::autocast::is_autocast_enabled(device.type()) &&
      at::autocast::is_autocast_cache_enabled();
}

} // namespace

BackwardRun::BackwardRun(
    const Units& units,
    const UnitContext& context,
    Schedule& schedule,
    Reducer& reducer,
    ThreadCheck& thread_check,
    UnitLifecycle& lifecycle,
    OrderConsensus& consensus)
    : units_(units),
      context_(context),
      schedule_(schedule),
      reducer_(reducer),
      thread_check_(thread_check),
      lifecycle_(lifecycle),
      consensus_(consensus),
      untracked_(
          context.streams->device(),
          [this](const RecordedCall& recorded) { enter_untracked(recorded); },
          [this](const CallHandle& call) {
            return schedule_.is_resident(call.unit) || !schedule_.passes().reads(call);
          }) {
  for (const auto& unit : units) {
    progress_.push_back({0, -1, std::vector<uint8_t>(unit->params().size(), 0)});
  }
}

void BackwardRun::expect(const std::vector<at::Tensor>& outputs, uint64_t first) {
  on_backward_of(outputs, context_.streams->device(), first, while_owned([this] { begin(); }));
}

void BackwardRun::expect(
    const std::vector<at::Tensor>& outputs,
    const RecordedCall& recorded,
    int64_t number) {
  on_backward_of(
      outputs, context_.streams->device(), recorded.first, while_owned([this, recorded, number] {
        pre_backward(recorded, number);
      }));
}

std::function<void()> BackwardRun::while_owned(std::function<void()> run) const {
  return [owner = owner_, run = std::move(run)] {
    if (const auto alive = owner.lock()) {
      run();
    }
  };
}

void BackwardRun::begin() {
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
  consensus_.settle_pass();
  lifecycle_.take_changes();
  TORCH_CHECK(
      !consensus_.failed(),
      "the forward raised on rank ",
      consensus_.failed().value_or(-1),
      " of the model's ranks, so there is nothing to average this backward with. All ranks must "
      "skip it: let them agree on that before the backward.");
  for (const auto& unit : units_) {
    lifecycle_.trainable().sync(unit->id());
  }
  schedule_.begin_backward();
  untracked_.begin_backward();
  if (consensus_.ranks_differ()) {
    untracked_.keep_watching();
  }
  choose_reduced();
  on_backward_end(while_owned([this, running = std::move(running)]() mutable {
    end();
    running.reset(); // autograd may keep what it has called
  }));
}

// A backward for other gradients than the unit's (of inputs, or of chosen parameters) must not be
// taken for one in which its gradients are zero.
void BackwardRun::choose_reduced() {
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

void BackwardRun::pre_backward(const RecordedCall& recorded, int64_t number) {
  const UnitId id = recorded.call.unit;
  RECORD_USER_SCOPE("zerocore::pre_backward (" + units_[id]->name() + ")");
  untracked_.announce(number);
  note_changes(id);
  TORCH_CHECK(
      !c10::GradMode::is_enabled() || !units_[id]->context().mesh.shards_parameters ||
          schedule_.is_held_unsharded(id),
      "backward with create_graph=True through unit '",
      units_[id]->name(),
      "': a second backward would need parameters that stage 3 has given back by then. Use stage 2 "
      "or lower, or run forward and both backwards inside `with zerocore.unsharded(model):`.");
  begin();
  go_through(id);
  consensus_.ask_in_backward(recorded.call);
  lifecycle_.run([&](Actions& out) {
    if (schedule_.pre_backward(recorded.call, out)) {
      forget_fired(id);
    }
  });
  if (schedule_.is_resident(id)) {
    lifecycle_.catch_up(id);
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
  if (units_[id]->versions().tell_autograd()) {
    progress_[id].changed = true;
  }
}

// Autograd asks nothing of what a checkpoint reads again, and nobody has gathered it since.
void BackwardRun::begin_recompute(UnitId id) {
  TORCH_CHECK(
      runs_node_of(context_.streams->device()),
      "unit '",
      units_[id]->name(),
      "' is called in a backward by a node of another device, which autograd runs beside those of ",
      context_.streams->device(),
      ". Return outputs of checkpointed modules on that device, and move them outside of the "
      "checkpoint; hooks that call the model belong on tensors there.");
  begin();
  note_changes(id);
  TORCH_CHECK(
      !progress_[id].changed,
      "backward through unit '",
      units_[id]->name(),
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
  if (progress.num_fired == lifecycle_.trainable().count(id)) {
    lifecycle_.run([&](Actions& out) { schedule_.ready(id, out); });
  }
}

void BackwardRun::forget_fired(UnitId id) {
  std::fill(progress_[id].fired.begin(), progress_[id].fired.end(), 0);
  progress_[id].num_fired = 0;
}

void BackwardRun::end() {
  throw_untracked_error();
  lifecycle_.run([&](Actions& out) { schedule_.finish_program(out); });
  consensus_.serve_others();
  lifecycle_.run([&](Actions& out) { schedule_.end_backward(out); });
  reduce_rest();
  reduce_held_back();
  for (const auto& unit : units_) {
    lifecycle_.keep_writes(unit->id()); // of one that stays unsharded
  }
  forget_progress();
  const std::vector<bool> reduced = reducer_.finish();
  untracked_.end_backward();
  recomputed_calls_.end_backward();
  lifecycle_.set_in_backward_pass(false);
  consensus_.end_backward();
  run_user_hooks(reduced);
}

// All ranks have made the same backwards, or others hear here of units that this one did not use.
void BackwardRun::finalize() {
  consensus_.settle_pass();
  const std::vector<bool> held = context_.any_rank(
      c10::fmap(units_, [this](const auto& unit) { return reducer_.holds_back(unit->id()); }));
  for (const auto& unit : units_) {
    if (held[unit->id()]) {
      reducer_.reduce(unit->id());
    }
  }
  run_user_hooks(reducer_.finish());
}

// Gradients that came when the calls said that there are no more: of a unit that this rank used
// when the order of all ranks had left it, or that is used outside of calls. The reductions
// must not depend on one rank's gradients, so ranks ask each other after the first backward of each
// sequence of calls, which is the same on all ranks, and from then on if there were such gradients.
void BackwardRun::reduce_rest() {
  std::vector<bool> rest = c10::fmap(units_, [this](const auto& unit) {
    return unit->settings().syncs && !reducer_.deferred() && reducer_.has_grads(unit->id());
  });
  bool has_rest = std::find(rest.begin(), rest.end(), true) != rest.end();
  if (context_.collectives != nullptr) {
    if (rest_by_shape_.size() >= kMaxBackwardShapes) {
      rest_by_shape_.clear(); // on all ranks at once
    }
    const auto [known, is_new] = rest_by_shape_.try_emplace(schedule_.shape(), false);
    // The order knows a call when it has ended. In a backward inside of it ranks always ask.
    const bool is_inside = schedule_.in_rooted_pass() || schedule_.num_entered() > 0;
    if (is_new || known->second || is_inside || consensus_.ranks_differ()) {
      rest = context_.any_rank(rest);
      known->second = known->second || std::find(rest.begin(), rest.end(), true) != rest.end();
      has_rest = known->second;
    }
    TORCH_CHECK(
        !has_rest || known->second || consensus_.ranks_differ(),
        "unit '",
        units_[std::find(rest.begin(), rest.end(), true) - rest.begin()]->name(),
        "': a gradient came after those of the unit had been reduced, unlike in earlier calls of "
        "the same modules. ",
        uses_autocast_cache(context_.streams->device())
            ? "The backward runs inside of a torch.autocast region, whose cache keeps copies of "
              "weights to its end: if the region goes around several steps, a forward computes "
              "with the weights of an earlier one. Leave the region before the backward, or pass "
              "cache_enabled=False."
            : "If checkpoints around several units were switched on, run the step again on all "
              "ranks; if full parameters were used outside of calls of the model, do that inside "
              "of `with zerocore.unsharded(model):` up to the end of the backward.");
  }
  for (const auto& unit : units_) {
    if (has_rest && rest[unit->id()]) {
      reducer_.reduce(unit->id());
    }
  }
}

// Backwards without sync have left sums of units that this one does not go through. Ranks have made
// the same reductions of them, so they hold the same units' sums back.
void BackwardRun::reduce_held_back() {
  for (const auto& unit : units_) {
    if (schedule_.is_reduced(unit->id()) && reducer_.has_late_sums(unit->id())) {
      reducer_.reduce(unit->id());
    }
  }
}

// Users register hooks on the shards, which is where optimizers look; gradients come to be there
// without autograd.
void BackwardRun::run_user_hooks(const std::vector<bool>& reduced) {
  for (const auto& unit : units_) {
    for (const UnitParam& param : unit->params()) {
      if (reduced[unit->id()] && gradient_of(param.shard).defined()) {
        run_accumulated_hooks(param.shard);
      }
    }
  }
}

void BackwardRun::forget_progress() {
  for (const auto& unit : units_) {
    forget_fired(unit->id());
    progress_[unit->id()].backward = -1;
    progress_[unit->id()].changed = false;
    lifecycle_.update_registration(unit->id());
  }
}

void BackwardRun::reset() {
  lifecycle_.set_in_backward_pass(false);
  untracked_error_ = nullptr;
  rest_by_shape_.clear();
  untracked_.reset();
  recomputed_calls_.reset();
}

} // namespace zerocore
