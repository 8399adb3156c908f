// The end of a backward: which gradients exist, showing them, and dropping what failed.
#include <c10/core/GradMode.h>

#include <algorithm>

#include "engine/autograd.h"
#include "engine/reducer.h"

namespace zerocore {

std::vector<bool> Reducer::reduced() const {
  std::vector<bool> flags;
  flags.reserve(grads_.size());
  for (const UnitGrads& unit : grads_) {
    flags.push_back(unit.reduced);
  }
  return flags;
}

void Reducer::finish() {
  const at::NoGradGuard no_grad;
  complete_all();
  wait_across();
  const bool any_reduced =
      std::any_of(grads_.begin(), grads_.end(), [](const UnitGrads& unit) { return unit.reduced; });
  if (any_reduced && context_.collectives != nullptr && (options_.exchange_used || !asked_used_)) {
    exchange_used();
  }
  for (UnitId id = 0; id < static_cast<UnitId>(grads_.size()); ++id) {
    if (grads_[id].touched) {
      note_use(id);
      show(id);
    }
    grads_[id].touched = false;
    grads_[id].reduced = false;
  }
}

// Note [Unused parameters]
// A parameter that no rank used keeps no gradient, as it would on one device; one that some rank
// used has a gradient on all. Which is which takes one small all-reduce. It is done in the first
// backward, and after that only if some rank left a parameter unused then (or if asked for):
// models that use everything never pay for it.
void Reducer::exchange_used() {
  std::vector<bool> flags;
  bool any_unused = false;
  for (size_t id = 0; id < grads_.size(); ++id) {
    for (size_t i = 0; i < grads_[id].params.size(); ++i) {
      const bool used = grads_[id].params[i].used;
      flags.push_back(used);
      any_unused = any_unused ||
          (grads_[id].reduced && !used && units_[id]->params()[i].full.requires_grad());
    }
  }
  flags.push_back(any_unused);
  flags = context_.any_rank(flags);
  auto used = flags.begin();
  for (UnitGrads& unit : grads_) {
    for (ParamGrads& param : unit.params) {
      param.used = *used++;
    }
  }
  asked_used_ = true;
  options_.exchange_used = options_.exchange_used || *used;
}

void Reducer::show(UnitId id) {
  UnitGrads& unit = grads_[id];
  // Without an exchange every parameter of a reduced unit counts as used by some rank.
  const bool assume_used = !options_.exchange_used && context_.collectives != nullptr;
  for (size_t i = 0; i < unit.params.size(); ++i) {
    ParamGrads& param = unit.params[i];
    UnitParam& owner = units_[id]->params()[i];
    if (!param.grad.defined() || !owner.full.requires_grad()) {
      continue;
    }
    const bool had_grad = gradient_of(owner.shard).defined();
    const bool shown = had_grad || param.used || (unit.reduced && assume_used);
    const bool held_back = !unit.reduced && !persistent();
    param.valid = held_back ? had_grad && param.valid : shown;
    if (!had_grad && shown) {
      if (held_back) {
        param.grad.zero_(); // only a mark that zero_grad() can remove
      }
      owner.shard.mutable_grad() = param.grad;
    } else if (had_grad && !gradient_of(owner.shard).is_same(param.grad)) {
      owner.shard.mutable_grad() = param.grad;
    }
    param.used = param.used && !unit.reduced;
  }
}

// The optimizer may read and write the gradients from here on.
void Reducer::note_use(UnitId id) const {
  for (const RegionGrads& grads : grads_[id].regions) {
    if (grads.shard ? grads.shard->attached() : grads.full.attached()) {
      context_.streams->note_write(
          StreamRole::Compute, shard_of(grads), "gives gradients", units_[id]->name());
    }
  }
}

void Reducer::reset() {
  for (const auto& [id, region] : in_flight_) {
    RegionGrads& grads = grads_[id].regions[region];
    grads.pending.wait(*context_.streams);
    release_slots(grads);
  }
  in_flight_.clear();
  wait_across();
  for (UnitId id = 0; id < static_cast<UnitId>(grads_.size()); ++id) {
    clear_full_grads(id);
    for (RegionGrads& grads : grads_[id].regions) {
      grads.local = false;
      release_slots(grads);
    }
    for (ParamGrads& param : grads_[id].params) {
      param.used = false;
      param.local = false;
    }
    grads_[id].touched = false;
    grads_[id].reduced = false;
  }
}

int64_t Reducer::persistent_nbytes() const {
  int64_t nbytes = 0;
  for (const UnitGrads& unit : grads_) {
    for (const RegionGrads& grads : unit.regions) {
      const Bucket& home = grads.shard ? *grads.shard : grads.full;
      nbytes += home.attached() ? home.nbytes() : 0;
    }
  }
  return nbytes;
}

} // namespace zerocore
