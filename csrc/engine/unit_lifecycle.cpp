// Units as the calls, the backward and the optimizer use them.
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
  // After an exception the rest is not done later: reset() sets right what is missing.
  const auto forget = c10::make_scope_exit([&] { actions_.clear(); });
  gather_late();
  for (const Action& action : actions_) {
    Unit& unit = *units_[action.unit];
    if (action.kind != ActionKind::Unshard) {
      gather_late();
    } else if (gathers_later()) {
      late_.push_back(action.unit);
      continue;
    }
    switch (action.kind) {
      case ActionKind::Unshard:
        offload_.wait_weights(action.unit);
        unit.unshard();
        break;
      case ActionKind::Reshard:
        keep_writes(action.unit);
        unit.reshard();
        break;
      case ActionKind::Reduce:
        reducer_.reduce(action.unit);
        break;
    }
    if (action.kind != ActionKind::Unshard) {
      update_registration(action.unit);
    }
  }
}

bool UnitLifecycle::gathers_later() const {
  return context_.tiers.has_host_states() && context_.streams->has_streams() &&
      schedule_.in_rooted_pass() && !in_backward_pass_;
}

// In order; up to a unit, if it is among them.
void UnitLifecycle::gather_late(std::optional<UnitId> last) {
  auto end = late_.end();
  if (last) {
    const auto found = std::find(late_.begin(), late_.end(), *last);
    end = found == late_.end() ? late_.begin() : found + 1;
  }
  const std::vector<UnitId> units(late_.begin(), end);
  late_.erase(late_.begin(), end);
  for (const UnitId id : units) {
    offload_.wait_weights(id);
    units_[id]->unshard();
  }
}

void UnitLifecycle::wait_for(UnitId id) {
  gather_late(id);
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
      keep_writes(id);
      trainable_.take_from_full(id);
    }
    if (full && !in_backward_pass_) {
      trainable_.sync(id);
    }
    show_params_(id, full);
    full_shown_[id] = full;
  }
}

bool UnitLifecycle::refresh(UnitId id) {
  check_homes(id);
  Unit& unit = *units_[id];
  if (schedule_.is_active(id)) {
    return false;
  }
  if (unit.is_fresh()) { // maybe by a gather behind a step or in a backward, which told nobody
    if (unit.mark_fresh()) {
      schedule_.passes().note_change(id);
    }
    return false;
  }
  take_change(id);
  return true;
}

void UnitLifecycle::take_change(UnitId id) {
  Unit& unit = *units_[id];
  const bool trained = unit.mark_fresh();
  schedule_.invalidate(id, actions_, trained);
  carry_out();
  unit.note_change();
  unit.cast_main();
}

void UnitLifecycle::take_changes() {
  for (const auto& unit : units_) {
    if (!schedule_.is_active(unit->id()) && take_behind(*unit)) {
      schedule_.invalidate(unit->id(), actions_, /*trained=*/false); // autograd refuses or not
      carry_out();
    }
  }
}

void UnitLifecycle::catch_up(UnitId id) {
  if (take_behind(*units_[id])) {
    schedule_.residency().regather(id, actions_);
    carry_out();
  }
}

bool UnitLifecycle::take_behind(Unit& unit) {
  if (!unit.is_behind()) {
    return false;
  }
  unit.mark_caught_up();
  unit.note_change();
  unit.cast_main();
  order_gathers();
  return true;
}

void UnitLifecycle::begin_inner_step() {
  gather_late();
  for (const auto& unit : units_) {
    unit->wait_for_unshard(); // gathers ahead must not meet the update
    if (schedule_.is_entered(unit->id())) {
      keep_writes(unit->id());
    }
  }
  write_check_.add_rest();
  finish_writes();
}

void UnitLifecycle::end_inner_step() {
  const at::NoGradGuard no_grad;
  std::vector<UnitId> in_use;
  for (const auto& unit : units_) {
    check_homes(unit->id());
    if (unit->is_fresh()) {
      continue;
    }
    take_change(unit->id());
    // The order of calls may be in a call that this rank skips; it does not release the unit.
    const bool stays = unit->context().mesh.shards_parameters && schedule_.is_resident(unit->id());
    if (stays || schedule_.is_active(unit->id())) {
      in_use.push_back(unit->id());
    }
  }
  order_gathers();
  for (const UnitId id : in_use) {
    schedule_.residency().regather(id, actions_);
    carry_out();
    use(id);
  }
  set_hiding(false);
}

void UnitLifecycle::begin_hold(UnitId id) {
  context_.pool->set_apart(true); // what is held for long must not shape the arena
  const auto back = c10::make_scope_exit([this] { context_.pool->set_apart(false); });
  if (refresh(id)) {
    order_gathers();
  }
  schedule_.residency().hold_unsharded(id, actions_);
  carry_out();
}

void UnitLifecycle::wait_held(UnitId id) {
  context_.pool->set_apart(true);
  const auto back = c10::make_scope_exit([this] { context_.pool->set_apart(false); });
  wait_for(id);
}

void UnitLifecycle::hold_unsharded(const std::vector<UnitId>& units) {
  size_t num_held = 0;
  try {
    for (const UnitId id : units) {
      ++num_held;
      begin_hold(id);
      wait_held(id);
      update_registration(id);
    }
  } catch (...) {
    for (size_t i = 0; i < num_held; ++i) {
      schedule_.residency().release_unsharded(units[i], actions_);
    }
    throw;
  }
}

std::vector<std::string> UnitLifecycle::release_unsharded(
    const std::vector<UnitId>& units,
    bool write_back) {
  const at::NoGradGuard no_grad;
  std::vector<std::string> lost;
  for (const UnitId id : units) {
    std::vector<int> changed = units_[id]->take_back(write_back);
    if (write_back) {
      if (units_[id]->take_writes()) {
        write_check_.add(id);
      }
      units_[id]->write_back(/*all=*/true);
      units_[id]->versions().mark_written();
    }
    const auto written = units_[id]->versions().take_writes(/*keeps=*/false);
    if (!write_back) {
      changed.insert(changed.end(), written.begin(), written.end());
      for (const int param : changed) {
        lost.push_back(units_[id]->params()[param].spec.fqn);
      }
    }
    schedule_.residency().release_unsharded(id, actions_);
    carry_out();
    update_registration(id);
  }
  return lost;
}

void UnitLifecycle::set_kept(UnitId id, bool kept) {
  if (!kept) {
    schedule_.residency().drop(id, actions_);
    carry_out();
    update_registration(id);
    return;
  }
  if (refresh(id)) {
    order_gathers();
  }
  schedule_.residency().keep(id, actions_);
  carry_out();
}

// Gathers begin behind the compute stream, on which the shards were written.
void UnitLifecycle::order_gathers() {
  if (schedule_.residency().gathers()) {
    context_.streams->order(StreamRole::AllGather, StreamRole::Compute);
  }
}

// Resharded or not, each unit gets into the state that the schedule has it in when nothing runs.
// Actions may have failed, so the two may differ.
void UnitLifecycle::settle() {
  schedule_.abort(actions_);
  hides_ = false;
  actions_.clear();
  late_.clear();
  finish_writes();
  write_check_.forget();
  for (const auto& unit : units_) {
    unit->take_back(/*keeps=*/false);
    if (unit->context().mesh.shards_parameters) {
      unit->versions().take_writes(/*keeps=*/false);
      if (!schedule_.is_resident(unit->id()) && unit->state() != UnitState::Sharded) {
        unit->reshard();
      }
    } else if (!unit->is_gathered()) {
      // No action: the unit is gathered when it is used.
      schedule_.invalidate(unit->id(), actions_);
    }
  }
}

// Code that changed parameters (`with torch.no_grad(): self.weight.clamp_()`) changed what is
// gathered; this rank's part of it is kept where that is not the shard itself. It counts as a
// change at every stage: a rank that shows the shards changes those.
void UnitLifecycle::keep_writes(UnitId id) {
  Unit& unit = *units_[id];
  const at::NoGradGuard no_grad;
  if (!unit.take_writes()) {
    return;
  }
  const UnitMesh& mesh = unit.context().mesh;
  TORCH_CHECK_VALUE(
      !mesh.gathers_near(),
      "unit '",
      unit.name(),
      "': its parameters were changed in place while they were gathered, which goes neither with "
      "regather= nor, at stage "
      "3, with replicas_share='optimizer': near ranks keep parts of what they gathered. Shard the "
      "model without.");
  unit.mark_written();
  const bool are_others_there = context_.control != nullptr && schedule_.in_rooted_pass();
  if (mesh.shards_parameters && are_others_there && schedule_.follows_order()) {
    unit.keep_write();
  }
  are_others_there ? write_check_.add_later(id) : write_check_.add(id);
  if (!unit.keeps_write() && (mesh.shards_parameters || !unit.main().empty())) {
    unit.write_back(/*all=*/false);
  }
}

void UnitLifecycle::finish_writes() {
  for (const auto& unit : units_) {
    if (unit->keeps_write()) {
      unit->finish_write();
    }
  }
}

void UnitLifecycle::drop_writes() {
  for (const auto& unit : units_) {
    unit->drop_writes();
  }
}

std::vector<UnitId> UnitLifecycle::in_forward_order(const std::vector<UnitId>& units) const {
  std::vector<UnitId> order;
  for (const Instruction& event : schedule_.order().events()) {
    const bool is_new = std::find(order.begin(), order.end(), event.unit) == order.end();
    if (is_new && std::find(units.begin(), units.end(), event.unit) != units.end()) {
      order.push_back(event.unit);
    }
  }
  return order;
}

void UnitLifecycle::check_homes(UnitId id) const {
  for (const UnitParam& param : units_.at(id)->params()) {
    TORCH_CHECK_VALUE(
        memory_of(param).storage().unsafeGetStorageImpl() == param.home,
        "parameter '",
        param.spec.fqn,
        "': its shard was moved out of the memory that zerocore gathers from (by a move of the "
        "model, or `param.data = other`), so training would have no effect. Change values in place "
        "(`param.data.copy_(other)`), and move the model before zerocore.shard.");
  }
}

void UnitLifecycle::begin_update(const std::vector<UnitId>& units, bool casts) {
  const at::NoGradGuard no_grad;
  write_check_.set_updating(true);
  offload_.begin_step();
  for (const UnitId id : units) {
    units_[id]->wait_for_unshard();
    check_homes(id);
    if (casts) { // what the update leaves alone must be right already
      units_[id]->cast_main();
    }
  }
  if (casts && context_.disk != nullptr) {
    offload_.order_updates(in_forward_order(units));
  }
}

void UnitLifecycle::end_update(const std::vector<UpdatedUnit>& units, bool casts) {
  for (const UpdatedUnit& updated : units) {
    Unit& unit = *units_.at(updated.unit);
    unit.versions().mark_updated(updated.params);
    if (casts && !offload_.take_sent(updated.unit)) {
      unit.main().return_weights(); // the optimizer has updated the host's weights itself
    }
    if (casts) {
      unit.mark_cast();
    }
  }
  write_check_.set_updating(false);
  offload_.end_step();
}

std::vector<UnitId> UnitLifecycle::updated_units() const {
  std::vector<UnitId> updated;
  for (const auto& unit : units_) {
    const UnitContext& context = unit->context();
    if (unit->versions().are_all_updated() &&
        context.mesh.gathers_behind_step(unit->layout(), context.tiers)) {
      updated.push_back(unit->id());
    }
  }
  return updated;
}

// Autograd hears of the changes as of others: by the next forward or backward.
void UnitLifecycle::gather_updated(const std::vector<UnitId>& units) {
  const at::NoGradGuard no_grad;
  for (const UnitId id : units) {
    check_homes(id);
    units_[id]->note_change();
    units_[id]->cast_main();
  }
  order_gathers();
  for (const UnitId id : units) {
    units_[id]->mark_taken();
    schedule_.invalidate(id, actions_, /*trained=*/false);
    schedule_.residency().unshard(id, actions_);
    carry_out();
  }
}

void UnitLifecycle::finish_gathers() {
  for (const auto& unit : units_) {
    try {
      unit->wait_for_unshard();
    } catch (...) {
      unit->versions().mark_changed();
      throw;
    }
  }
}

} // namespace zerocore
