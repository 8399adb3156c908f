// Which parameters require grad must be the same on all ranks: what the engine tells the alarm;
// and what ranks have agreed on.
#include <array>

#include "common/math.h"
#include "engine/engine.h"
#include "runtime/issue_guard.h"

namespace zerocore {

void Engine::note_trainable(UnitId id) {
  UnitProgress& progress = progress_[id];
  const auto& params = units_[id]->params();
  uint64_t hash = static_cast<uint64_t>(id) + 1;
  for (const UnitParam& param : params) {
    hash = mix(hash, param.shard.requires_grad() ? 2 : 1);
  }
  if (hash == progress.trainable) {
    return;
  }
  trainable_ += hash - progress.trainable;
  progress.trainable = hash;
  for (Collectives* each : {context_.collectives, context_.replicas}) {
    if (each != nullptr) {
      each->set_facts(trainable_);
    }
  }
  std::vector<bool> flags;
  for (const UnitParam& param : params) {
    flags.push_back(param.shard.requires_grad());
  }
  size_t first = 0;
  for (UnitId before = 0; before < id; ++before) {
    first += units_[before]->params().size();
  }
  alarm_.set_trainable(first, flags);
}

void Engine::fail_trainable() {
  alarm_.fail(
      "the ranks train different parameters; requires_grad_() must change on all ranks alike");
}

Agreed Engine::agreed() const {
  Agreed result;
  result.num_calls = schedule_.calls().size();
  result.num_shapes = rest_by_shape_.size();
  const Collectives* control = peers_ == nullptr ? nullptr : &peers_->collectives();
  const std::array<const Collectives*, 3> groups = {
      context_.collectives, context_.replicas, control};
  for (const Collectives* each : groups) {
    if (each != nullptr && each->guard() != nullptr) {
      result.num_points += each->guard()->num_points();
      result.num_compared += each->guard()->num_compared();
    }
  }
  return result;
}

} // namespace zerocore
