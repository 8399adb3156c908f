// Wires units, schedule, reducer and autograd.
#include "engine/engine.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <utility>

#include "engine/autograd.h"

namespace zerocore {

namespace {

std::unique_ptr<Collectives> make_collectives(
    const std::optional<std::string>& name,
    const Streams& streams,
    Alarm* alarm) {
  if (!name) {
    return nullptr;
  }
  return std::make_unique<Collectives>(c10d::resolve_process_group(*name), streams, alarm);
}

std::unique_ptr<Peers> make_peers(const std::optional<std::string>& name, Alarm* alarm) {
  return name ? std::make_unique<Peers>(c10d::resolve_process_group(*name), alarm) : nullptr;
}

UnitContext make_context(
    int64_t stage,
    Collectives* collectives,
    Collectives* replicas,
    Peers* peers,
    Streams& streams,
    BucketPool& pool,
    Trace& trace) {
  if (collectives == nullptr) {
    std::swap(collectives, replicas); // nothing to shard: replicas of everything
    stage = 0;
  }
  UnitContext context;
  const int64_t world_size = collectives == nullptr ? 1 : collectives->size();
  context.policy = StagePolicy::from_stage(stage, world_size);
  context.collectives = collectives;
  context.replicas = replicas;
  context.peers = peers;
  context.streams = &streams;
  context.pool = &pool;
  context.trace = &trace;
  context.num_shards = context.policy.shards_optimizer() ? world_size : 1;
  context.shard = context.policy.shards_optimizer() ? collectives->rank() : 0;
  return context;
}

std::vector<std::unique_ptr<Unit>> make_units(
    std::vector<UnitSpec> specs,
    const UnitContext& context) {
  std::vector<std::unique_ptr<Unit>> units;
  for (UnitSpec& spec : specs) {
    const auto id = static_cast<UnitId>(units.size());
    units.push_back(
        std::make_unique<Unit>(id, std::move(spec.name), std::move(spec.params), context));
  }
  return units;
}

} // namespace

Engine::Engine(
    const EngineOptions& options,
    c10::Device device,
    std::vector<UnitSpec> units,
    std::vector<CallEvent> order,
    std::unique_ptr<Registrar> registrar)
    : options_(options),
      streams_(device, options.log_hand_overs ? &hand_overs_ : nullptr),
      pool_(streams_),
      trace_(streams_),
      alarm_(options, device, units),
      collectives_(make_collectives(options.groups.shard, streams_, alarm_.get())),
      replicas_(make_collectives(options.groups.replicas, streams_, alarm_.get())),
      peers_(make_peers(options.groups.control, alarm_.get())),
      context_(make_context(
          options.sharding.stage,
          collectives_.get(),
          replicas_.get(),
          peers_.get(),
          streams_,
          pool_,
          trace_)),
      units_(make_units(std::move(units), context_)),
      progress_(units_.size()),
      schedule_(
          ScheduleOptions::of(static_cast<int>(units_.size()), options.sharding, context_.policy),
          std::move(order)),
      reducer_(units_, context_, options),
      registrar_(std::move(registrar)),
      thread_check_(/*backward_threads=*/device.type() != c10::DeviceType::CPU),
      side_doors_(
          [this](const RecordedCall& recorded) { enter_by_side_door(recorded); },
          [this](UnitId id) { return is_done(id) || schedule_.is_resident(id); }) {
  expect_step();
}

Engine::~Engine() {
  // Otherwise what is in flight never ends here, or has ended with the alarm.
  if (!thread_check_.is_forked() && !alarm_.is_raised()) {
    leaving_ = false; // the others free their model, too
    try {
      reset();
    } catch (const std::exception& error) {
      TORCH_WARN("zerocore: a collective failed while the model was freed: ", error.what());
    }
  }
  alarm_.retire();
}

void Engine::start(bool consistent) {
  for (UnitId id = 0; id < num_units(); ++id) {
    progress_[id].fired.assign(units_[id]->params().size(), 0);
    note_trainable(id);
    units_[id]->mark_fresh();
    units_[id]->mark_cast();
    units_[id]->mark_gathered();
    if (!consistent) {
      units_[id]->versions().mark_changed();
    }
  }
}

// -- shared ---------------------------------------------------------------------------------

// Before a use of units. A backward that ended with an exception never reached end_backward().
void Engine::recover() {
  TORCH_CHECK_TYPE(
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode),
      "torch.func transforms (grad, vmap, jacrev, ...) do not go through a sharded model: what "
      "they compute with is not what autograd sees. Use torch.autograd.grad, or transform a plain "
      "model that has loaded zerocore.full_state_dict(model).");
  alarm_.check();
  if (in_backward()) {
    return;
  }
  if (backward_) {
    thread_check_.check_no_backward();
    reset();
  }
  settle_pass();
  if (failed_) {
    reset(); // as the rank that raised has done
  }
  thread_check_.enter_forward();
}

Engine::Call Engine::pop_call() {
  const Call call = calls_.back();
  calls_.pop_back();
  if (calls_.empty()) {
    thread_check_.leave_forward();
  }
  return call;
}

void Engine::run(Actions& actions) {
  // After an exception the rest is not done later: reset() sets right what is missing.
  const auto forget = c10::make_scope_exit([&] { actions.clear(); });
  for (const Action& action : actions) {
    Unit& unit = *units_[action.unit];
    switch (action.kind) {
      case ActionKind::Unshard:
        unit.unshard();
        break;
      case ActionKind::Reshard:
        unit.reshard();
        break;
      case ActionKind::Reduce:
        reducer_.reduce(action.unit, sync_);
        break;
    }
    if (action.kind != ActionKind::Unshard) {
      update_registration(action.unit);
    }
  }
}

// The compute stream works with the full parameters from here on.
void Engine::use(UnitId id) {
  units_[id]->wait_for_unshard();
  units_[id]->note_use();
  update_registration(id);
}

void Engine::update_registration(UnitId id) {
  const bool full = schedule_.is_active(id);
  if (progress_[id].full_shown != full) {
    if (full) {
      sync_requires_grad(id);
    }
    registrar_->show(id, full);
    progress_[id].full_shown = full;
  }
}

// Carries requires_grad from the parameters the user sees to those that compute.
void Engine::sync_requires_grad(UnitId id) {
  UnitProgress& progress = progress_[id];
  if (backward_) {
    return;
  }
  progress.num_trainable = 0;
  auto& params = units_[id]->params();
  for (size_t i = 0; i < params.size(); ++i) {
    UnitParam& param = params[i];
    const bool requires_grad = param.shard.requires_grad();
    TORCH_CHECK_VALUE(
        !requires_grad || !param.lacks_main,
        "parameter '",
        param.spec.fqn,
        "' was frozen when the model was sharded, so mixed precision keeps no main weight of it. "
        "Call requires_grad_(True) before zerocore.shard; it can be frozen again after.");
    if (param.full.requires_grad() != requires_grad) {
      param.full.set_requires_grad(requires_grad);
    }
    progress.num_trainable += requires_grad ? 1 : 0;
    if (requires_grad && !std::exchange(param.hooked, true)) {
      on_grad_accumulated(param.full, [weak = weak_from_this(), id, i] {
        if (const auto engine = weak.lock()) {
          engine->grad_ready(id, static_cast<int>(i));
        }
      });
    }
  }
  schedule_.set_reducible(id, progress.num_trainable > 0);
  if (!schedule_.in_rooted_pass()) { // there it is noted at the beginning, as ranks skip units
    note_trainable(id);
  }
}

// Takes note of changed shards. True if there are: gathers must be ordered behind the change.
bool Engine::refresh(UnitId id) {
  check_homes(id);
  Unit& unit = *units_[id];
  if (unit.gathered_version() == unit.version() || schedule_.is_active(id)) {
    return false;
  }
  schedule_.invalidate(id, actions_);
  run(actions_);
  unit.mark_fresh();
  unit.note_change();
  unit.cast_main();
  return true;
}

// Gathers begin behind the compute stream, on which the shards were written.
void Engine::order_gathers() {
  if (context_.policy.shards_optimizer()) {
    streams_.order(StreamRole::AllGather, StreamRole::Compute);
  }
}

// Resharded or not, each unit gets into the state that the schedule has it in when nothing runs.
// Actions may have failed, so the two may differ.
void Engine::settle() {
  schedule_.abort(actions_);
  actions_.clear();
  for (UnitId id = 0; id < num_units(); ++id) {
    Unit& unit = *units_[id];
    if (context_.policy.shards_parameters()) {
      if (!schedule_.is_resident(id) && unit.state() != UnitState::Sharded) {
        unit.reshard();
      }
    } else if (!unit.is_gathered()) {
      schedule_.invalidate(id, actions_); // no action: it is gathered again when it is used
    }
  }
}

void Engine::reset() {
  settle_pass(); // the others count on it
  failed_.reset();
  backward_ = false;
  side_door_error_ = nullptr;
  rest_by_shape_.clear();
  side_doors_.reset();
  calls_.clear();
  thread_check_.leave_forward();
  settle();
  reducer_.reset();
  for (UnitId id = 0; id < num_units(); ++id) {
    if (streams_.has_streams()) {
      units_[id]->wait_for_unshard(); // where nothing is resharded: the memory may be freed next
    }
    forget_fired(id);
    progress_[id].backward = -1;
    progress_[id].outdated.clear();
    update_registration(id);
  }
}

} // namespace zerocore
