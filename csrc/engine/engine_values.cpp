// Before and between steps: places in the pool, parameters read, set, changed by optimizers.
#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>

#include <utility>

#include "engine/engine.h"
#include "plan/memory_plan.h"

namespace zerocore {

// Places in the pool for what the first step is going to take from it.
void Engine::expect_step() {
  std::vector<UnitPlan> plans;
  for (const auto& unit : units_) {
    plans.push_back({specs_of(unit->params()), {}});
  }
  PlanOptions expected;
  expected.sharding = options_.sharding;
  expected.world_size = collectives_ == nullptr ? 1 : collectives_->size();
  expected.num_replicas = replicas_ == nullptr ? 1 : replicas_->size();
  if (collectives_ != nullptr) {
    expected.methods = collectives_->methods();
  }
  pool_.expect(plan_pool(plans, schedule_.order(), expected));
}

// After recover() for what is no call of the model: any thread may call it next.
void Engine::leave_if_outside() {
  if (calls_.empty()) {
    thread_check_.leave_forward();
  }
}

void Engine::hold_unsharded(const std::vector<UnitId>& units) {
  recover();
  pool_.set_apart(true); // what is held for long must not shape the arena
  const auto back = c10::make_scope_exit([this] { pool_.set_apart(false); });
  size_t num_held = 0;
  try {
    for (const UnitId id : units) {
      if (refresh(id)) {
        order_gathers();
      }
      schedule_.hold_unsharded(id, actions_);
      ++num_held;
      run(actions_);
      use(id);
    }
  } catch (...) {
    for (size_t i = 0; i < num_held; ++i) {
      schedule_.release_unsharded(units[i], actions_);
    }
    reset();
    throw;
  }
  leave_if_outside();
}

void Engine::release_unsharded(const std::vector<UnitId>& units, bool write_back) {
  const at::NoGradGuard no_grad;
  for (const UnitId id : units) {
    if (write_back) {
      units_[id]->write_back();
    }
    units_[id]->versions().take_writes(); // kept or not, as asked
    schedule_.release_unsharded(id, actions_);
    run(actions_);
    update_registration(id);
  }
}

void Engine::check_homes(UnitId id) const {
  const UnitParam* moved = find_moved(std::as_const(*units_.at(id)).params());
  TORCH_CHECK_VALUE(
      moved == nullptr,
      "parameter '",
      moved == nullptr ? "" : moved->spec.fqn,
      "': its shard was moved out of the memory that zerocore gathers from (by a move of the "
      "model, or `param.data = other`), so training would have no effect. Change values in place "
      "(`param.data.copy_(other)`), and move the model before zerocore.shard.");
}

void Engine::materialize(UnitId unit, const std::vector<at::Tensor>& full, bool broadcast) {
  recover();
  leave_if_outside();
  units_.at(unit)->materialize(full, broadcast);
}

std::vector<at::Tensor> Engine::full_values(UnitId unit) {
  recover();
  leave_if_outside();
  return units_.at(unit)->full_values();
}

void Engine::begin_update(const std::vector<UnitId>& units, bool casts) {
  const at::NoGradGuard no_grad;
  for (const UnitId id : units) {
    check_homes(id);
    if (casts) { // what the update leaves alone must be right already
      units_[id]->cast_main();
    }
  }
}

void Engine::end_update(const std::vector<UpdatedUnit>& units, bool casts) {
  for (const UpdatedUnit& updated : units) {
    Unit& unit = *units_.at(updated.unit);
    if (updated.params) {
      unit.versions().mark_updated(*updated.params);
    } else {
      unit.versions().mark_updated();
    }
    if (casts) {
      unit.mark_cast();
    }
  }
}

void Engine::mark_forked() {
  if (collectives_ != nullptr || replicas_ != nullptr) {
    thread_check_.mark_forked();
  }
}

} // namespace zerocore
