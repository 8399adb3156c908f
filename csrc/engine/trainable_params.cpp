#include "engine/trainable_params.h"

#include <utility>

#include "common/math.h"
#include "engine/graph/autograd.h"

namespace zerocore {

// Programs may use a whole parameter before its unit is entered.
void TrainableParams::start(OnGradient on_gradient) {
  on_gradient_ = std::move(on_gradient);
  for (const auto& unit : units_) {
    for (size_t i = 0; i < unit->params().size(); ++i) {
      if (unit->params()[i].is_whole) {
        watch(unit->id(), i);
      }
    }
  }
}

void TrainableParams::watch(UnitId id, size_t index) {
  UnitParam& param = units_[id]->params()[index];
  if (!param.full.requires_grad() || param.node != nullptr) {
    return;
  }
  const auto tell = [on_gradient = on_gradient_, id, index](bool arrived) {
    return [=] { on_gradient(id, static_cast<int>(index), arrived); };
  };
  param.node = on_grad_accumulated(param.full, tell(false), tell(true));
}

void TrainableParams::take_from_full(UnitId id) {
  for (UnitParam& param : units_[id]->params()) {
    if (param.full.requires_grad() != param.trained) {
      param.trained = param.full.requires_grad();
      param.shard.set_requires_grad(param.trained);
    }
  }
}

void TrainableParams::sync(UnitId id) {
  take_from_full(id);
  Trainable& use = trainable_[id];
  use.count = 0;
  auto& params = units_[id]->params();
  for (size_t i = 0; i < params.size(); ++i) {
    UnitParam& param = params[i];
    const bool requires_grad = param.shard.requires_grad();
    TORCH_CHECK_VALUE(
        !requires_grad || !param.lacks_main,
        "parameter '",
        param.spec.fqn,
        "' was frozen when the model was sharded, so it has no main weight, which mixed precision "
        "trains. "
        "Call requires_grad_(True) before zerocore.shard; freeze it again after that.");
    param.full.set_requires_grad(requires_grad);
    param.trained = requires_grad;
    use.count += requires_grad ? 1 : 0;
    watch(id, i);
  }
  schedule_.passes().set_reducible(id, use.count > 0);
  if (!schedule_.in_root_forward()) { // a root forward notes all units when it begins
    note(id);
  }
}

void TrainableParams::note(UnitId id) {
  Trainable& use = trainable_[id];
  const auto& params = units_[id]->params();
  uint64_t hash = static_cast<uint64_t>(id) + 1;
  for (const UnitParam& param : params) {
    hash = mix(hash, param.shard.requires_grad() ? 2 : 1);
  }
  if (hash == use.hash) {
    return;
  }
  sum_ += hash - use.hash;
  use.hash = hash;
  for (Collectives* each : collectives_of(units_)) {
    each->watch().set_facts(sum_);
  }
  if (alarm_ == nullptr) {
    return;
  }
  std::vector<bool> flags;
  for (const UnitParam& param : params) {
    flags.push_back(param.shard.requires_grad());
  }
  size_t first = 0;
  for (UnitId before = 0; before < id; ++before) {
    first += units_[before]->params().size();
  }
  alarm_->ledger().set_trainable(first, flags);
}

} // namespace zerocore
