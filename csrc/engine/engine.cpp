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
    const Streams& streams) {
  if (!name) {
    return nullptr;
  }
  return std::make_unique<Collectives>(c10d::resolve_process_group(*name), streams);
}

UnitContext make_context(
    EngineOptions options,
    Collectives* collectives,
    Collectives* replicas,
    Streams& streams,
    BucketPool& pool,
    Trace& trace) {
  if (collectives == nullptr) {
    std::swap(collectives, replicas); // nothing to shard: replicas of everything
    options.stage = 0;
  }
  UnitContext context;
  const int64_t world_size = collectives == nullptr ? 1 : collectives->size();
  context.policy = StagePolicy::from_stage(options.stage, world_size);
  context.collectives = collectives;
  context.replicas = replicas;
  context.streams = &streams;
  context.pool = &pool;
  context.trace = &trace;
  context.num_shards = context.policy.shards_optimizer() ? world_size : 1;
  context.shard = context.policy.shards_optimizer() ? collectives->rank() : 0;
  return context;
}

std::vector<std::unique_ptr<Unit>> make_units(
    std::vector<UnitInit> inits,
    const UnitContext& context) {
  std::vector<std::unique_ptr<Unit>> units;
  for (UnitInit& init : inits) {
    const auto id = static_cast<UnitId>(units.size());
    units.push_back(
        std::make_unique<Unit>(id, std::move(init.name), std::move(init.params), context));
  }
  return units;
}

// Whether a backward will come through one of them. None comes through a leaf, such as the output
// of a frozen module that a hook has made require a gradient.
bool any_recorded(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    return tensor.requires_grad() && !tensor.is_leaf();
  });
}

} // namespace

Engine::Engine(
    EngineOptions options,
    const std::optional<std::string>& group,
    const std::optional<std::string>& replicas,
    c10::Device device,
    std::vector<UnitInit> units,
    std::vector<CallEvent> order,
    std::unique_ptr<Registrar> registrar)
    : options_(options),
      streams_(device, options.log_hand_overs ? &hand_overs_ : nullptr),
      pool_(streams_),
      trace_(streams_),
      collectives_(make_collectives(group, streams_)),
      replicas_(make_collectives(replicas, streams_)),
      context_(make_context(options, collectives_.get(), replicas_.get(), streams_, pool_, trace_)),
      units_(make_units(std::move(units), context_)),
      progress_(units_.size()),
      schedule_(
          {static_cast<int>(units_.size()),
           options.prefetch,
           context_.policy.shards_optimizer(),
           context_.policy.shards_parameters()},
          std::move(order)),
      reducer_(units_, context_, {options.hold_full, options.exchange_used}),
      registrar_(std::move(registrar)),
      thread_check_(/*backward_threads=*/device.type() != c10::DeviceType::CPU),
      side_doors_(
          [this](const RecordedCall& recorded) { enter_by_side_door(recorded); },
          [this](UnitId id) { return schedule_.is_resident(id); }) {
  expect_step();
}

Engine::~Engine() {
  if (thread_check_.is_forked()) {
    return; // what is in flight never ends here
  }
  try {
    reset();
  } catch (const std::exception& error) {
    TORCH_WARN("zerocore: a collective failed while the model was freed: ", error.what());
  }
}

void Engine::start(bool consistent) {
  for (UnitId id = 0; id < num_units(); ++id) {
    progress_[id].fired.assign(units_[id]->params().size(), 0);
    units_[id]->mark_fresh();
    units_[id]->mark_cast();
    units_[id]->mark_gathered();
    if (!consistent) {
      units_[id]->mark_changed();
    }
  }
}

// -- forward --------------------------------------------------------------------------------

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
  schedule_.end_pass(actions_);
  run(actions_);
  for (const auto& unit : units_) {
    unit->wait_for_unshard(); // of a skipped unit: must not meet the optimizer's update
  }
  if (!agreed_) {
    agree_on_called();
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

void Engine::fail_pass() {
  if (!pop_call().recomputing) {
    reset();
  }
}

void Engine::enter(UnitId id) {
  recover();
  const bool recomputing = in_backward();
  if (recomputing) {
    begin_backward();
  }
  calls_.push_back({recomputing, next_node()});
  if (recomputing) {
    if (schedule_.recompute(id, actions_)) {
      forget_fired(id);
    }
  } else {
    if (!schedule_.in_rooted_pass() && refresh(id)) {
      order_gathers();
    }
    schedule_.enter(id, c10::GradMode::is_enabled(), actions_);
  }
  run(actions_);
  use(id);
}

void Engine::adopt(UnitId id) {
  TORCH_INTERNAL_ASSERT(in_call(), "adopt outside of a call");
  const bool held = schedule_.is_entered(id) || schedule_.is_pinned(id);
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
  if (unit.take_writes() && (context_.policy.shards_parameters() || unit.main_nbytes() > 0)) {
    const at::NoGradGuard no_grad;
    unit.write_back();
  }
}

// A rank that never calls a unit the others call would wait for it forever once the order is
// learned; units that no rank calls would be gathered for nothing. Asked once.
void Engine::agree_on_called() {
  agreed_ = true;
  std::vector<bool> called = schedule_.called();
  if (context_.collectives != nullptr) {
    called = context_.any_rank(called);
  }
  schedule_.prune(called);
}

// -- shared ---------------------------------------------------------------------------------

// Before a use of units. A backward that ended with an exception never reached end_backward().
void Engine::recover() {
  TORCH_CHECK_TYPE(
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode),
      "torch.func transforms (grad, vmap, jacrev, ...) do not go through a sharded model: what "
      "they "
      "compute with is not what autograd sees. Use torch.autograd.grad, or transform a plain copy "
      "that has loaded zerocore.full_state_dict(model).");
  if (in_backward()) {
    return;
  }
  if (backward_) {
    thread_check_.check_no_backward();
    reset();
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

// What wrote the shards ran on the compute stream.
void Engine::order_gathers() {
  if (context_.policy.shards_optimizer()) {
    streams_.order(StreamRole::AllGather, StreamRole::Compute);
  }
}

// Makes the units what the schedule believes of them when nothing runs: actions may have failed.
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
