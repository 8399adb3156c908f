// The work between passes; optimizer_steps.cpp has the optimizers' steps.
#include "engine/engine.h"

#include <ATen/core/functional.h>
#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>

#include <utility>

#include "common/types.h"
#include "watch/alarm.h"

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
      lifecycle_(units_, context_, schedule_, offload_, reducer_, std::move(show_params)),
      consensus_(units_, context_, schedule_, lifecycle_),
      calls_(units_, context_, schedule_, reducer_, lifecycle_, consensus_) {
  for (const auto& unit : units_) {
    set_staying(unit->id(), {unit->settings().stays, false});
  }
}

Engine::~Engine() {
  Alarm* alarm = context_.alarm;
  // Waits only for work that can end. A model that never started has no work, a forked process
  // never sees its end, and a raised alarm has aborted it.
  if (started_ && !calls_.thread_check().is_forked() && (alarm == nullptr || !alarm->is_raised())) {
    consensus_.abandon_pass();
    try {
      calls_.reset();
    } catch (const std::exception& error) {
      TORCH_WARN("zerocore: a collective failed while the model was freed: ", message_of(error));
    }
  }
  if (alarm != nullptr && Watchdog::of_process().remove(alarm)) {
    alarm->ledger().forget(); // the ledger points to units' names
  }
}

void Engine::start(bool consistent) {
  started_ = true;
  calls_.set_owner(weak_from_this());
  lifecycle_.start(consistent, [weak = weak_from_this()](UnitId id, int param, bool arrived) {
    const auto engine = weak.lock(); // a graph may outlive the engine
    if (engine && arrived) {
      engine->calls_.grad_ready(id, param);
    } else if (engine) {
      move_seen_grad(engine->units_[id]->params()[param]);
    }
  });
}

void Engine::hold_unsharded(const std::vector<UnitId>& units) {
  const auto use = calls_.use();
  size_t num_held = 0;
  try {
    for (const UnitId id : units) {
      lifecycle_.refresh(id);
      ++num_held;
      gather_held(id);
      wait_held(id);
      lifecycle_.update_registration(id);
    }
  } catch (...) {
    Actions dropped; // reset() reshards the units
    for (size_t i = 0; i < num_held; ++i) {
      schedule_.residency().release_unsharded(units[i], dropped);
    }
    calls_.reset();
    throw;
  }
}

void Engine::begin_hold(UnitId id) {
  const auto use = calls_.use(/*may_be_parked=*/true);
  offload_.wait_updates();
  lifecycle_.refresh(id);
  gather_held(id);
}

void Engine::gather_held(UnitId id) {
  pool().set_apart(true); // a long hold must not influence the arena
  const auto back = c10::make_scope_exit([this] { pool().set_apart(false); });
  lifecycle_.run([&](Actions& out) { schedule_.residency().hold_unsharded(id, out); });
}

void Engine::wait_held(UnitId id) {
  pool().set_apart(true);
  const auto back = c10::make_scope_exit([this] { pool().set_apart(false); });
  lifecycle_.wait_for(id);
}

std::vector<std::string> Engine::release_unsharded(
    const std::vector<UnitId>& units,
    bool write_back) {
  const at::NoGradGuard no_grad;
  std::vector<std::string> lost;
  for (const UnitId id : units) {
    Unit& unit = *units_.at(id);
    unit.follow_whole();
    std::vector<int> changed = unit.take_back(write_back);
    if (write_back) {
      if (unit.take_writes()) {
        lifecycle_.writes().add(id);
      }
      unit.write_back(/*all=*/true);
      unit.versions().mark_written();
    }
    const auto written = unit.versions().take_writes(/*keeps=*/false);
    if (!write_back) {
      changed.insert(changed.end(), written.begin(), written.end());
      for (const int param : changed) {
        lost.push_back(unit.params()[param].spec.fqn);
      }
    }
    lifecycle_.run([&](Actions& out) { schedule_.residency().release_unsharded(id, out); });
    lifecycle_.update_registration(id);
  }
  return lost;
}

void Engine::unshard(UnitId id) {
  const auto use = calls_.use();
  lifecycle_.refresh(id);
  lifecycle_.run([&](Actions& out) { schedule_.residency().unshard_ahead(id, out); });
}

void Engine::reshard(UnitId id) {
  const auto use = calls_.use(/*may_be_parked=*/true);
  lifecycle_.run([&](Actions& out) { schedule_.residency().end_stay(id, out); });
  lifecycle_.update_registration(id);
}

void Engine::set_parked(bool parked) {
  if (parked) {
    const auto use = calls_.use();
    offload_.synchronize(); // gradients may still be on their way to the host
    reducer_.release_kept();
    for (const auto& unit : units_) {
      lifecycle_.refresh(unit->id());
      if (!unit->context().mesh.shards_parameters) { // the full parameters are the parked memory
        hold_unsharded({unit->id()});
        release_unsharded({unit->id()}, /*write_back=*/false);
      }
    }
    pool().free_unused();
  }
  for (const auto& unit : units_) { // an export of a parked model gathers from all ranks
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

void Engine::materialize(UnitId unit, const std::vector<at::Tensor>& full, bool broadcast) {
  const auto use = calls_.use();
  offload_.wait_updates();
  units_.at(unit)->materialize(full, broadcast);
  if (context_.disk != nullptr) {
    context_.disk->store(unit);
  }
}

std::vector<at::Tensor> Engine::full_values(UnitId unit) {
  const auto use = calls_.use();
  offload_.wait_updates();
  units_.at(unit)->follow_whole();
  return units_.at(unit)->full_values();
}

void Engine::begin_deferred() {
  reducer_.set_deferred(true);
  for (const auto& unit : units_) {
    set_staying(unit->id(), {true, true});
  }
}

void Engine::end_deferred(bool drops) {
  reducer_.set_deferred(false);
  for (const auto& unit : units_) {
    set_staying(unit->id(), {unit->settings().stays, false});
  }
  if (drops) {
    calls_.reset();
    return;
  }
  calls_.finalize_backward();
  for (const auto& unit : units_) {
    reshard(unit->id());
  }
}

std::vector<bool> Engine::any_rank(const std::vector<bool>& flags) {
  const auto use = calls_.use();
  return context_.any_rank(flags, MessageKind::OptimizerFlags);
}

Exchange Engine::exchange(size_t mesh, bool across, const at::Tensor& sent, MessageSizes sizes) {
  Collectives* group = resources_.group_of(mesh, across ? AxisName::Replicas : AxisName::State);
  TORCH_INTERNAL_ASSERT(group != nullptr, "the model has no group for this exchange");
  return {context_, *group, sent, std::move(sizes)};
}

void Engine::mark_forked() {
  offload_.mark_forked();
  if (context_.mesh.communicates()) {
    calls_.thread_check().mark_forked();
  }
}

} // namespace zerocore
