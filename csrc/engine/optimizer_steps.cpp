// Engine::begin_update, end_update and exchange: an optimizer's step, between passes or inside one.
#include "engine/engine.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace zerocore {

namespace {

int64_t sum_of(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

} // namespace

Exchange::Exchange(
    const UnitContext& context,
    Collectives& group,
    const at::Tensor& sent,
    MessageSizes sizes)
    : streams_(*context.streams),
      received_(
          at::empty(
              {sum_of(sizes.received) / static_cast<int64_t>(sent.itemsize())},
              sent.options())) {
  const int64_t leaves = sum_of(sizes.sent) - sizes.sent.at(group.rank());
  CollectiveTag tag{&kOptimizer, context.note(TraceOp::AllToAll, -1, leaves)};
  streams_.note_write(StreamRole::Compute, sent, "sends", kOptimizer);
  streams_.order(group.reducing(), StreamRole::Compute);
  // Exchanges bytes, because backends support few dtypes.
  pending_ = group.all_to_all(
      {received_.view(at::kByte), sent.view(at::kByte), std::move(tag)}, std::move(sizes));
}

at::Tensor Exchange::wait() {
  pending_.wait(streams_);
  streams_.note_read(StreamRole::Compute, received_, "receives", kOptimizer);
  return received_;
}

void Engine::begin_update(const std::vector<UnitId>& units, bool casts) {
  check_not_capturing(
      context_.streams->device(), "an optimizer stepped parameters of a sharded model");
  calls_.check_not_parked();
  if (is_in_use()) {
    begin_inner_step();
  }
  lifecycle_.set_hiding(true);
  const at::NoGradGuard no_grad;
  for (const UnitId id : units) {
    lifecycle_.writes().note_gradients(id, reducer_.views());
  }
  lifecycle_.writes().set_updating(true);
  offload_.begin_step();
  for (const UnitId id : units) {
    units_[id]->wait_for_unshard();
    lifecycle_.check_homes(id);
    if (casts) { // the optimizer casts only the elements that it updates
      units_[id]->cast_main();
    }
  }
  if (casts && context_.disk != nullptr) {
    offload_.order_updates(in_forward_order(units));
  }
  calls_.begin_step();
}

bool Engine::end_update(const std::vector<UpdatedUnit>& units, bool casts) {
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
  lifecycle_.writes().set_updating(false);
  offload_.end_step();
  calls_.end_step();
  if (is_in_use()) {
    end_inner_step();
  } else if (lifecycle_.in_backward_pass()) {
    lifecycle_.set_hiding(false);
  } else {
    lifecycle_.stop_hiding();
    return gather_behind_step();
  }
  return false;
}

// Returns whether the step runs inside a call or a hold; equal on all ranks.
bool Engine::is_in_use() const {
  return calls_.has_calls() || std::ranges::any_of(units_, [this](const auto& unit) {
           return schedule_.is_held_unsharded(unit->id());
         });
}

// Waits for the all-gathers of running calls, and writes the calls' changes back to the shards.
void Engine::begin_inner_step() {
  lifecycle_.gather_delayed();
  finish_gathers(); // prefetches must not read shards during the update
  for (const auto& unit : units_) {
    if (schedule_.is_entered(unit->id())) {
      lifecycle_.writes().save(unit->id());
    }
  }
  lifecycle_.writes().add_rest();
  lifecycle_.writes().finish();
}

// Marks updated units as stale. Units in use are gathered again at once, others when they are
// entered.
void Engine::end_inner_step() {
  const at::NoGradGuard no_grad;
  std::vector<UnitId> in_use;
  for (const auto& unit : units_) {
    const UnitId id = unit->id();
    lifecycle_.check_homes(id);
    if (unit->is_fresh()) {
      continue;
    }
    lifecycle_.invalidate(id);
    // A unit may be resident for a call of other ranks only: they gather it again, too.
    const bool stays = unit->context().mesh.shards_parameters && schedule_.is_resident(id);
    if (stays || schedule_.is_active(id)) {
      in_use.push_back(id);
    }
  }
  lifecycle_.order_gathers();
  for (const UnitId id : in_use) {
    lifecycle_.run([&](Actions& out) { schedule_.residency().regather(id, out); });
    lifecycle_.use(id);
  }
  lifecycle_.set_hiding(false);
}

std::vector<UnitId> Engine::in_forward_order(const std::vector<UnitId>& units) const {
  std::vector<UnitId> order;
  for (const Instruction& event : schedule_.order().events()) {
    const bool is_new = std::ranges::find(order, event.unit) == order.end();
    if (is_new && std::ranges::find(units, event.unit) != units.end()) {
      order.push_back(event.unit);
    }
  }
  return order;
}

// See Note [Gathers after a step]. Does not bump autograd's versions; the next forward or backward
// does.
bool Engine::gather_behind_step() {
  std::vector<UnitId> updated;
  for (const auto& unit : units_) {
    const UnitContext& context = unit->context();
    if (unit->versions().are_all_updated() &&
        context.mesh.gathers_behind_step(unit->layout(), context.tiers)) {
      updated.push_back(unit->id());
    }
  }
  if (updated.empty()) {
    return false;
  }
  const auto use = calls_.use();
  const at::NoGradGuard no_grad;
  for (const UnitId id : updated) {
    lifecycle_.check_homes(id);
    units_[id]->cast_changes();
  }
  lifecycle_.order_gathers();
  for (const UnitId id : updated) {
    units_[id]->mark_taken();
    lifecycle_.run([&](Actions& out) {
      schedule_.invalidate(id, out, /*trained=*/false);
      schedule_.residency().unshard(id, out);
    });
  }
  consensus_.note_gathers(updated);
  return true;
}

void Engine::finish_gathers() {
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
