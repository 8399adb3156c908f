// The forward half of the engine: calls of the model and of its units.
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "engine/autograd.h"
#include "engine/engine.h"

namespace zerocore {

namespace {

// Whether a backward will come through one of them. None comes through a leaf, such as the output
// of a frozen module that a hook has made require a gradient.
bool any_recorded(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    return tensor.requires_grad() && !tensor.is_leaf();
  });
}

} // namespace

void Engine::begin_pass() {
  recover();
  if (schedule_.in_rooted_pass() || in_backward()) {
    calls_.push_back({true}); // nested: the outer pass goes on
    return;
  }
  calls_.push_back({false});
  side_doors_.forget(schedule_.oldest_pass());
  bool changed = false;
  for (UnitId id = 0; id < num_units(); ++id) {
    changed = refresh(id) || changed;
    note_trainable(id);
  }
  if (changed) {
    order_gathers();
  }
  schedule_.begin_pass(c10::GradMode::is_enabled(), actions_);
  run(actions_);
}

void Engine::end_pass(const std::vector<at::Tensor>& outputs) {
  leave_adopted(outputs);
  if (pop_call().recomputing) {
    return; // nested
  }
  leave_pass();
  for (const auto& unit : units_) {
    unit->wait_for_unshard(); // of a skipped unit: must not meet the optimizer's update
  }
  if (any_recorded(outputs)) {
    on_backward_of(outputs, [weak = weak_from_this()] {
      if (const auto engine = weak.lock()) {
        engine->begin_backward();
      }
    });
  }
  side_doors_.expect_backward();
}

// Ranks may raise in other places than this one, or not at all: the pass's collectives are issued
// to the end, and then all ranks drop it.
void Engine::fail_pass() {
  leave_adopted({});
  if (pop_call().recomputing) {
    return; // nested
  }
  if (!is_alone()) {
    failed_ = peers_->rank();
    try {
      leave_pass();
      settle_pass();
    } catch (const std::exception&) {
      // The user must see the error of the call itself; the next use raises the alarm.
    }
  }
  reset();
}

void Engine::enter(UnitId id) {
  recover();
  const bool recomputing = in_backward();
  if (recomputing) {
    begin_backward();
  }
  calls_.push_back({recomputing, next_node()});
  if (recomputing) {
    if (ranks_differ_) {
      const CallHandle call = schedule_.recomputed_call(id, actions_);
      run(actions_);
      ask_in_backward(call);
    }
    if (schedule_.recompute(id, actions_)) {
      forget_fired(id);
    }
  } else {
    if (!schedule_.in_rooted_pass() && refresh(id)) {
      order_gathers();
    }
    if (peers_ != nullptr && schedule_.in_rooted_pass() && schedule_.follows_order() &&
        !schedule_.is_expected(id)) {
      schedule_.finish_order(actions_);
      run(actions_);
      ask_for(id);
    }
    schedule_.enter(id, c10::GradMode::is_enabled(), actions_);
  }
  run(actions_);
  use(id);
}

void Engine::adopt(UnitId id) {
  TORCH_INTERNAL_ASSERT(in_call(), "adopt outside of a call");
  const bool held = schedule_.is_entered(id) || schedule_.is_held_unsharded(id);
  if (!held || in_backward()) { // there it may be released before this call ends
    enter(id);
    calls_.back().adopted = id;
  }
}

void Engine::exit(UnitId id, const std::vector<at::Tensor>& outputs, bool keep) {
  leave_adopted(outputs);
  leave(id, outputs, keep);
  if (calls_.empty()) {
    side_doors_.expect_backward();
  }
}

void Engine::leave_adopted(const std::vector<at::Tensor>& outputs) {
  while (calls_.back().adopted >= 0) {
    leave(calls_.back().adopted, outputs, false);
  }
}

void Engine::leave(UnitId id, const std::vector<at::Tensor>& outputs, bool keep) {
  const Call entered = pop_call();
  const bool has_output = any_recorded(outputs);
  RecordedCall recorded{{-1, -1, id}, 0, entered.first_node, next_node()};
  int64_t number = -1;
  if (!entered.recomputing) {
    // Outputs that are nowhere to be found, see Note [Side doors]; and without grad mode in a pass
    // that records: reentrant checkpointing, whose backward comes.
    const bool has_nodes = recorded.last > recorded.first;
    const bool wanted = c10::GradMode::is_enabled() ? has_nodes : progress_[id].num_trainable > 0;
    keep_writes(id);
    units_[id]->note_use();
    recorded.call = schedule_.exit(id, has_output || wanted, actions_, keep);
    run(actions_);
    update_registration(id);
    recorded.version = units_[id]->version();
    if (has_nodes && recorded.call.pass >= 0) {
      number = side_doors_.add(recorded);
    }
  } else {
    recorded.version = units_[id]->version();
    number = side_doors_.add_recomputed(recorded);
  }
  if (has_output) {
    const auto computed = computed_since(recorded.first, outputs);
    on_backward_of(computed, [weak = weak_from_this(), recorded, number] {
      if (const auto engine = weak.lock()) {
        engine->pre_backward(recorded, number);
      }
    });
  }
}

// A forward that changed its parameters in place (`with torch.no_grad(): self.weight.clamp_()`)
// changed what is gathered; this rank's part of it is kept where that is not the shard itself.
void Engine::keep_writes(UnitId id) {
  Unit& unit = *units_[id];
  if (unit.versions().take_writes() &&
      (context_.policy.shards_parameters() || unit.main_nbytes() > 0)) {
    const at::NoGradGuard no_grad;
    unit.write_back();
  }
}

// -- between ranks, see Note [One order on every rank] ---------------------------------------

// Serves the others until all of them gather the unit.
void Engine::ask_for(UnitId id) {
  for (;;) {
    peers_->say({id, /*changed=*/true, /*skipped=*/true, std::nullopt});
    const std::optional<UnitId> next = peers_->wait().wanted;
    TORCH_INTERNAL_ASSERT(next, "ranks that need a unit get none");
    if (*next == id) {
      return;
    }
    if (schedule_.in_rooted_pass()) {
      schedule_.serve(*next, actions_);
    } else {
      schedule_.serve_one(*next, actions_);
    }
    run(actions_);
  }
}

// A unit that was released too early (see Note [Side doors]) is gathered once more, which ranks
// that did not make the call do not know.
void Engine::ask_in_backward(const CallHandle& call) {
  if (ranks_differ_ && schedule_.is_out_of_turn(call)) {
    schedule_.finish_steps(actions_);
    run(actions_);
    if (!schedule_.is_resident(call.unit)) {
      ask_for(call.unit);
      schedule_.take_one(call.unit, actions_);
      run(actions_);
    }
  }
}

// At the end of a backward in which other ranks may have asked.
void Engine::serve_others() {
  if (!ranks_differ_) {
    return;
  }
  for (;;) {
    peers_->say({});
    const std::optional<UnitId> next = peers_->wait().wanted;
    if (!next) {
      return;
    }
    schedule_.serve_one(*next, actions_);
    run(actions_);
  }
}

bool Engine::is_alone() const {
  return peers_ == nullptr || !schedule_.follows_order();
}

// The others hear of it while this rank goes on to its loss, unless there is much to say.
void Engine::leave_pass() {
  if (is_alone()) {
    schedule_.end_pass(actions_);
    run(actions_);
    return;
  }
  schedule_.close_pass(actions_);
  run(actions_);
  peers_->say({std::nullopt, schedule_.changed(), schedule_.skipped(), failed_});
  leaving_ = true;
  if (schedule_.changed() || schedule_.skipped() || !c10::GradMode::is_enabled()) {
    settle_pass();
  }
}

// Before the next collective of this rank: the others may need units that it did not call.
void Engine::settle_pass() {
  if (!std::exchange(leaving_, false)) {
    return;
  }
  Peers::Answer answer = peers_->wait();
  while (answer.wanted) {
    schedule_.serve(*answer.wanted, actions_);
    run(actions_);
    peers_->say({std::nullopt, true, true, failed_});
    answer = peers_->wait();
  }
  failed_ = answer.failed;
  if (failed_) {
    schedule_.drop_pass();
    return;
  }
  std::vector<PassCalls> calls;
  if (answer.changed) {
    calls = peers_->gather(schedule_.calls());
  }
  ranks_differ_ = ranks_differ_ || answer.skipped;
  schedule_.settle_pass(calls, peers_->rank());
}

} // namespace zerocore
