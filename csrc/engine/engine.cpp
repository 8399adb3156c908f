// The parts of an engine, and the work between steps.
#include "engine/engine.h"

#include <ATen/core/functional.h>

#include <utility>

#include "common/error_text.h"
#include "engine/graph/autograd.h"
#include "watch/watchdog.h"

namespace zerocore {

Engine::Engine(
    const EngineOptions& options,
    c10::Device device,
    std::vector<UnitSpec> units,
    Instructions order,
    ShowParams show_params)
    : resources_(options, device, units, order),
      context_(resources_.contexts().front()),
      units_(make_units(std::move(units), resources_.contexts())),
      offload_(units_, context_, options.host_threads),
      schedule_(
          c10::fmap(units_, [](const auto& unit) { return unit->context().mesh; }),
          options.sharding,
          std::move(order)),
      reducer_(units_, context_, options.sharding, offload_),
      thread_check_(/*backward_threads=*/device.type() != c10::DeviceType::CPU),
      lifecycle_(units_, context_, schedule_, offload_, reducer_, std::move(show_params)),
      consensus_(units_, context_, schedule_, lifecycle_),
      backward_run_(units_, context_, schedule_, reducer_, thread_check_, lifecycle_, consensus_),
      calls_(
          units_,
          context_,
          schedule_,
          reducer_,
          thread_check_,
          lifecycle_,
          consensus_,
          backward_run_) {
  for (const auto& unit : units_) {
    lifecycle_.set_staying(unit->id(), {unit->settings().stays, false});
  }
}

Engine::~Engine() {
  Alarm* alarm = context_.alarm;
  // Only then may work be in flight that still ends: a model that never started has none, a forked
  // process never sees its end, and the alarm has ended it.
  if (started_ && !thread_check_.is_forked() && (alarm == nullptr || !alarm->is_raised())) {
    consensus_.leave_unsettled();
    try {
      calls_.reset();
    } catch (const std::exception& error) {
      TORCH_WARN("zerocore: a collective failed while the model was freed: ", message_of(error));
    }
  }
  if (alarm != nullptr && Watchdog::of_process().remove(alarm)) {
    alarm->ledger().forget(); // the names of units
  }
}

void Engine::start(bool consistent) {
  started_ = true;
  backward_run_.set_owner(weak_from_this());
  lifecycle_.start(consistent, [weak = weak_from_this()](UnitId id, int param) {
    if (const auto engine = weak.lock()) {
      engine->backward_run_.grad_ready(id, param);
    }
  });
}

void Engine::hold_unsharded(const std::vector<UnitId>& units) {
  calls_.recover();
  try {
    lifecycle_.hold_unsharded(units);
  } catch (...) {
    calls_.reset();
    throw;
  }
  calls_.leave_if_outside();
}

void Engine::begin_hold(UnitId unit) {
  calls_.recover(/*may_be_parked=*/true);
  offload_.wait_updates();
  lifecycle_.begin_hold(unit);
  calls_.leave_if_outside();
}

void Engine::set_parked(bool parked) {
  if (parked) {
    calls_.recover();
    offload_.synchronize(); // gradients may be on their way to the host
    for (const auto& unit : units_) {
      lifecycle_.refresh(unit->id());
      if (!unit->context().mesh.shards_parameters) { // all of it is parked
        hold_unsharded({unit->id()});
        lifecycle_.release_unsharded({unit->id()}, /*write_back=*/false);
      }
    }
    calls_.leave_if_outside();
    pool().free_unused();
  }
  for (const auto& unit : units_) { // exports of a parked model gather from all ranks
    unit->set_keeps_near(!parked);
  }
  calls_.set_parked(parked);
}

std::vector<at::Tensor> Engine::device_memory(UnitId id) const {
  const Unit& unit = *units_.at(id);
  std::vector<at::Tensor> memory;
  if (!context_.tiers.has_host_parameters() && unit.kept().nbytes() > 0) {
    memory.push_back(unit.kept().bytes());
  }
  if (unit.main().device_nbytes() > 0) {
    memory.push_back(unit.main().bytes());
  }
  const auto more = reducer_.device_memory(id);
  memory.insert(memory.end(), more.begin(), more.end());
  return memory;
}

void Engine::set_kept(UnitId unit, bool kept) {
  calls_.recover(/*may_be_parked=*/!kept);
  lifecycle_.set_kept(unit, kept);
  calls_.leave_if_outside();
}

void Engine::materialize(UnitId unit, const std::vector<at::Tensor>& full, bool broadcast) {
  calls_.recover();
  calls_.leave_if_outside();
  offload_.wait_updates();
  units_.at(unit)->materialize(full, broadcast);
  if (context_.disk != nullptr) {
    context_.disk->store(unit);
  }
}

std::vector<at::Tensor> Engine::full_values(UnitId unit) {
  calls_.recover();
  calls_.leave_if_outside();
  offload_.wait_updates();
  return units_.at(unit)->full_values();
}

// Each pass of the model comes to an end before its weights change.
void Engine::begin_update(const std::vector<UnitId>& units, bool casts) {
  check_not_capturing(
      context_.streams->device(), "an optimizer stepped parameters of a sharded model");
  calls_.check_not_parked();
  if (calls_.has_calls() || lifecycle_.holds_any()) {
    lifecycle_.begin_inner_step();
  }
  lifecycle_.set_hiding(true);
  lifecycle_.begin_update(units, casts);
  calls_.begin_step();
}

bool Engine::end_update(const std::vector<UpdatedUnit>& units, bool casts) {
  lifecycle_.end_update(units, casts);
  calls_.end_step();
  if (calls_.has_calls() || lifecycle_.holds_any()) {
    lifecycle_.end_inner_step();
  } else if (lifecycle_.in_backward_pass()) {
    lifecycle_.set_hiding(false);
  } else {
    lifecycle_.stop_hiding();
    return gather_behind_step();
  }
  return false;
}

bool Engine::gather_behind_step() {
  const std::vector<UnitId> updated = lifecycle_.updated_units();
  if (updated.empty()) {
    return false;
  }
  calls_.recover();
  lifecycle_.gather_updated(updated);
  consensus_.note_gathers(updated);
  calls_.leave_if_outside();
  return true;
}

void Engine::finalize_backward() {
  calls_.recover();
  backward_run_.finalize();
  calls_.leave_if_outside();
}

void Engine::begin_deferred() {
  reducer_.set_deferred(true);
  for (const auto& unit : units_) {
    lifecycle_.set_staying(unit->id(), {true, true});
  }
}

void Engine::end_deferred(bool drops) {
  reducer_.set_deferred(false);
  for (const auto& unit : units_) {
    lifecycle_.set_staying(unit->id(), {unit->settings().stays, false});
  }
  if (drops) {
    calls_.reset();
    return;
  }
  finalize_backward();
  for (const auto& unit : units_) {
    set_kept(unit->id(), false);
  }
}

std::vector<bool> Engine::any_rank(const std::vector<bool>& flags) {
  calls_.recover();
  calls_.leave_if_outside();
  return context_.any_rank(flags, MessageKind::OptimizerFlags);
}

Exchange Engine::exchange(size_t mesh, bool across, const at::Tensor& sent, MessageSizes sizes) {
  Collectives* group = resources_.group_of(mesh, across ? AxisName::Replicas : AxisName::State);
  TORCH_INTERNAL_ASSERT(group != nullptr, "an exchange over a group that the model does not have");
  return {context_, *group, sent, std::move(sizes)};
}

void Engine::mark_forked() {
  offload_.mark_forked();
  if (context_.mesh.communicates()) {
    thread_check_.mark_forked();
  }
}

} // namespace zerocore
