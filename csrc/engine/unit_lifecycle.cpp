#include "engine/unit_lifecycle.h"

#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

namespace zerocore {

void UnitLifecycle::start(bool consistent, TrainableParams::OnGradient on_gradient) {
  trainable_.start(std::move(on_gradient));
  for (const auto& unit : units_) {
    trainable_.note(unit->id());
    unit->mark_fresh();
    unit->mark_cast();
    unit->mark_gathered();
    if (!consistent) {
      unit->versions().mark_changed();
    }
  }
}

void UnitLifecycle::carry_out() {
  // After an exception the remaining actions are dropped; reset() repairs the units' states.
  const auto forget = c10::make_scope_exit([&] { actions_.clear(); });
  gather_delayed();
  for (const auto [kind, id] : actions_) {
    if (kind == ActionKind::Unshard) {
      gathers_later() ? delayed_.push_back(id) : gather(id);
      continue;
    }
    gather_delayed();
    if (kind == ActionKind::Reshard) {
      writes_.save(id);
      units_[id]->reshard();
    } else {
      reducer_.reduce(id);
    }
    update_registration(id);
  }
}

void UnitLifecycle::gather(UnitId id) {
  offload_.wait_weights(id);
  units_[id]->unshard();
}

bool UnitLifecycle::gathers_later() const {
  return context_.tiers.has_host_states() && context_.streams->has_streams() &&
      schedule_.in_root_forward() && !in_backward_pass_;
}

void UnitLifecycle::gather_delayed(std::optional<UnitId> last) {
  if (last && std::ranges::find(delayed_, *last) == delayed_.end()) {
    return;
  }
  while (!delayed_.empty()) {
    const UnitId id = delayed_.front();
    delayed_.pop_front();
    gather(id);
    if (id == last) {
      return;
    }
  }
}

void UnitLifecycle::wait_for(UnitId id) {
  gather_delayed(id);
  offload_.wait_weights(id);
  offload_.check();
  units_[id]->wait_for_unshard();
  units_[id]->note_use();
}

void UnitLifecycle::use(UnitId id) {
  wait_for(id);
  set_hiding(false);
  update_registration(id);
}

void UnitLifecycle::set_hiding(bool hides) {
  if (std::exchange(hides_, hides) != hides) {
    for (const auto& unit : units_) {
      update_registration(unit->id());
    }
  }
}

void UnitLifecycle::hide_unused() {
  for (const auto& unit : units_) {
    if (!schedule_.is_active(unit->id())) {
      show(unit->id(), false);
    }
  }
}

void UnitLifecycle::update_registration(UnitId id) {
  show(id, !hides_ && schedule_.is_shown(id));
}

void UnitLifecycle::show(UnitId id, bool full) {
  if (full_shown_[id] != full) {
    if (!full) {
      writes_.save(id);
      trainable_.take_from_full(id);
    }
    if (full && !in_backward_pass_) {
      trainable_.sync(id);
    }
    show_params_(id, full);
    full_shown_[id] = full;
  }
}

void UnitLifecycle::refresh(UnitId id) {
  if (refresh_one(id)) {
    order_gathers();
  }
}

std::vector<UnitId> UnitLifecycle::refresh_all() {
  bool any = false;
  std::vector<UnitId> again;
  for (const auto& unit : units_) {
    const UnitId id = unit->id();
    const bool was_resident = schedule_.is_resident(id);
    any = refresh_one(id) || any;
    trainable_.note(id);
    if (was_resident && !schedule_.is_resident(id)) {
      again.push_back(id);
    }
  }
  if (any) {
    order_gathers();
  }
  return again;
}

bool UnitLifecycle::refresh_one(UnitId id) {
  check_homes(id);
  Unit& unit = *units_[id];
  if (schedule_.is_active(id)) {
    return false;
  }
  if (unit.is_fresh()) { // a gather after a step or in a backward does not record the change
    if (unit.mark_fresh()) {
      schedule_.passes().note_change(id);
    }
    return false;
  }
  invalidate(id);
  return true;
}

void UnitLifecycle::invalidate(UnitId id) {
  Unit& unit = *units_[id];
  const bool trained = unit.mark_fresh();
  schedule_.invalidate(id, actions_, trained);
  carry_out();
  unit.cast_changes();
}

void UnitLifecycle::invalidate_changed() {
  for (const auto& unit : units_) {
    if (!schedule_.is_active(unit->id()) && unit->cast_shard_changes()) {
      order_gathers();
      // Autograd checks the versions of the tensors that it has saved.
      schedule_.invalidate(unit->id(), actions_, /*trained=*/false);
      carry_out();
    }
  }
}

void UnitLifecycle::regather_changed(UnitId id) {
  if (units_[id]->cast_shard_changes()) {
    order_gathers();
    schedule_.residency().regather(id, actions_);
    carry_out();
  }
}

void UnitLifecycle::order_gathers() {
  if (schedule_.residency().gathers()) {
    context_.streams->order(StreamRole::AllGather, StreamRole::Compute);
  }
}

// Actions may have failed half-way, so a unit's state may differ from the schedule's. Makes them
// agree.
void UnitLifecycle::reset() {
  schedule_.abort(actions_);
  hides_ = false;
  actions_.clear();
  delayed_.clear();
  writes_.finish();
  writes_.forget();
  for (const auto& unit : units_) {
    unit->take_back(/*keeps=*/false);
    if (unit->context().mesh.shards_parameters) {
      unit->versions().take_writes(/*keeps=*/false);
      if (!schedule_.is_resident(unit->id()) && unit->state() != ShardedState::Sharded) {
        unit->reshard();
      }
    } else if (!unit->is_gathered()) {
      // The schedule gives no action for this; the next use gathers the unit.
      schedule_.invalidate(unit->id(), actions_);
    }
  }
}

void UnitLifecycle::check_homes(UnitId id) const {
  units_.at(id)->follow_whole();
  for (const UnitParam& param : units_.at(id)->params()) {
    TORCH_CHECK_VALUE(
        param.is_whole || memory_of(param).storage().unsafeGetStorageImpl() == param.home,
        "parameter '",
        param.spec.fqn,
        "': its shard no longer lies in the memory that zerocore gathers (after a move of the "
        "model, or `param.data = other`), so training would have no effect. Change values in place "
        "(`param.data.copy_(other)`), and move the model before zerocore.shard.");
  }
}

} // namespace zerocore
