// Packs, reduces and accumulates gradients.
#include "engine/reducer.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace zerocore {

namespace {

std::string gradient_of(const Unit& unit) {
  return "the gradient of unit '" + unit.name() + "'";
}

c10::DataPtr zeros(c10::Device device, int64_t nbytes) {
  return at::zeros({nbytes}, at::TensorOptions().dtype(at::kByte).device(device))
      .storage()
      .set_data_ptr(c10::DataPtr(nullptr, device));
}

} // namespace

Reducer::RegionGrads::RegionGrads(const Unit& unit, int region_, bool exchanges)
    : region(region_),
      full(
          unit.layout(),
          {region_},
          unit.context().shard,
          unit.context().streams->device(),
          gradient_of(unit)),
      scratch(
          exchanges ? unit.layout() : unit.layout().of_shard(unit.context().shard),
          {region_},
          0,
          unit.context().streams->device(),
          gradient_of(unit)) {
  if (unit.context().policy.shards_gradients()) {
    shard.emplace(
        unit.layout().of_shard(unit.context().shard),
        std::vector<int>{region_},
        0,
        unit.context().streams->device(),
        gradient_of(unit));
  }
}

Reducer::Reducer(
    std::vector<std::unique_ptr<Unit>>& units,
    UnitContext context,
    ReducerOptions options)
    : units_(units), context_(context), options_(options), grads_(units.size()) {
  const bool exchanges = context_.collectives != nullptr && context_.collectives->exchanges();
  for (const auto& unit : units_) {
    UnitGrads& grads = grads_[unit->id()];
    grads.params.resize(unit->params().size());
    for (int region = 0; region < static_cast<int>(unit->layout().regions().size()); ++region) {
      const auto dtype = static_cast<c10::ScalarType>(unit->layout().regions()[region].dtype);
      if (c10::isFloatingType(dtype)) {
        grads.regions.emplace_back(*unit, region, exchanges);
      }
    }
  }
}

at::Tensor Reducer::make_grad(UnitId id, int param) const {
  const Unit& unit = *units_.at(id);
  const int region = unit.layout().places().at(param).region;
  const int64_t numel = unit.layout().owned(param, context_.shard).size();
  const int64_t offset = unit.layout().offset_in_shard(param, context_.shard);
  for (const RegionGrads& grads : grads_[id].regions) {
    if (grads.region == region && grads.shard) {
      return grads.shard->view(region, offset, {numel}, {1});
    }
    if (grads.region == region) {
      const int64_t begin = unit.layout().regions()[region].shard_range(context_.shard).begin;
      return grads.full.view(region, begin + offset, {numel}, {1});
    }
  }
  return {};
}

void Reducer::bind_grad(UnitId unit, int param, at::Tensor grad) {
  grads_.at(unit).params.at(param).grad = std::move(grad);
}

const at::Tensor& Reducer::shard_of(const RegionGrads& grads) const {
  return grads.shard ? grads.shard->full(grads.region) : grads.full.own(grads.region);
}

bool Reducer::is_trainable(const Unit& unit, int region) const {
  const auto& params = const_cast<Unit&>(unit).params();
  const auto& indices = unit.layout().regions()[region].params;
  return std::any_of(
      indices.begin(), indices.end(), [&](int i) { return params[i].full.requires_grad(); });
}

// -- one reduction --------------------------------------------------------------------------

void Reducer::reduce(UnitId id, bool sync) {
  const at::NoGradGuard no_grad;
  Unit& unit = *units_[id];
  const bool hold = !sync && (persistent() || options_.hold_full);
  touch(id);
  if (!persistent() || context_.policy.shards_optimizer()) {
    // At most one reduction in flight: its buckets are the next one's.
    complete_all();
  }
  for (RegionGrads& grads : grads_[id].regions) {
    if (!is_trainable(unit, grads.region)) {
      continue;
    }
    attach_full(grads);
    pack(id, grads);
    grads.local = hold;
    if (!hold) {
      issue(id, grads);
    }
  }
  clear_full_grads(id);
  grads_[id].reduced = grads_[id].reduced || !hold;
}

bool Reducer::has_grads(UnitId id) const {
  const auto& params = units_[id]->params();
  return std::any_of(params.begin(), params.end(), [](const UnitParam& param) {
    return param.full.grad().defined();
  });
}

// Takes over what the user did to the gradients since the last backward: dropped, kept, replaced.
void Reducer::touch(UnitId id) {
  UnitGrads& unit = grads_[id];
  if (std::exchange(unit.touched, true)) {
    return;
  }
  for (size_t i = 0; i < unit.params.size(); ++i) {
    ParamGrads& param = unit.params[i];
    const at::Tensor& current = units_[id]->params()[i].shard.grad();
    if (!current.defined()) {
      param.valid = false;
      param.local = false;
    } else if (!current.is_same(param.grad) && param.grad.defined()) {
      for (RegionGrads& grads : unit.regions) {
        Bucket& home = grads.shard ? *grads.shard : grads.full;
        if (!home.attached()) {
          home.attach(zeros(context_.streams->device(), home.nbytes()));
        }
      }
      param.grad.copy_(current);
      param.valid = true;
    }
  }
}

void Reducer::attach_full(RegionGrads& grads) {
  if (grads.shard && !grads.shard->attached()) {
    grads.shard->attach(zeros(context_.streams->device(), grads.shard->nbytes()));
  }
  if (grads.full.attached()) {
    return;
  }
  if (persistent()) {
    grads.full.attach(zeros(context_.streams->device(), grads.full.nbytes()));
  } else {
    grads.full_slot = context_.pool->acquire(grads.full.nbytes(), StreamRole::Compute);
    grads.full.attach(grads.full_slot.data.get());
  }
}

// The elements of the region where the bucket's value for the parameter is kept and added to.
Range Reducer::add_range(const Unit& unit, const RegionGrads& grads, int param) const {
  const ParamPlace& place = unit.layout().places()[param];
  const ParamGrads& state = grads_[unit.id()].params[param];
  if (grads.local) {
    return state.local ? place.range() : Range{place.offset, place.offset};
  }
  // A reduced value counts once in the next sum: where it is owned, at stage 0 on one rank.
  const bool owns = context_.policy.shards_optimizer() || context_.collectives == nullptr ||
      context_.collectives->rank() == 0;
  if (!persistent() || !state.valid || !owns) {
    return {place.offset, place.offset};
  }
  const Range own = unit.layout().regions()[grads.region].shard_range(context_.shard);
  const Range kept = intersect(place.range(), own);
  return kept.empty() ? Range{place.offset, place.offset} : kept;
}

void Reducer::pack(UnitId id, RegionGrads& grads) {
  const Unit& unit = *units_[id];
  const Region& region = unit.layout().regions()[grads.region];
  segments_.clear();
  const auto add_segment = [&](const at::Tensor* source, int64_t start, Range range, bool add) {
    if (!range.empty()) {
      segments_.push_back({source, range.begin - start, range.begin, range.size(), add});
    }
  };
  int64_t end = 0;
  for (const int i : region.params) {
    const ParamPlace& place = unit.layout().places()[i];
    const UnitParam& param = units_[id]->params()[i];
    ParamGrads& state = grads_[id].params[i];
    const at::Tensor* grad = param.full.grad().defined() ? &param.full.grad() : nullptr;
    TORCH_CHECK_VALUE(
        grad == nullptr || (grad->layout() == at::kStrided && grad->dtype() == param.full.dtype()),
        "parameter '",
        param.spec.fqn,
        "': its gradient is sparse or of another dtype, expected a dense one of the parameter's "
        "dtype. Use sparse=False.");
    const Range kept = add_range(unit, grads, i);
    add_segment(nullptr, 0, {end, place.offset}, false);
    add_segment(grad, place.offset, {place.offset, kept.begin}, false);
    add_segment(grad, place.offset, kept, true);
    add_segment(grad, place.offset, {kept.end, place.offset + place.numel}, false);
    end = place.offset + place.numel;
    state.used = state.used || grad != nullptr;
    state.local = true;
  }
  add_segment(nullptr, 0, {end, region.numel()}, false);
  const double scale = context_.collectives == nullptr
      ? 1.0
      : 1.0 / static_cast<double>(context_.collectives->size());
  kernels::pack(grads.full.full(grads.region), segments_, scale);
}

void Reducer::issue(UnitId id, RegionGrads& grads) {
  if (context_.collectives == nullptr) {
    return;
  }
  Collectives& collectives = *context_.collectives;
  const Unit& unit = *units_[id];
  const bool sharded = context_.policy.shards_optimizer();
  const bool adds = adds_to_shard(id, grads);
  if (sharded && (collectives.exchanges() || adds)) {
    grads.scratch_slot = context_.pool->acquire(grads.scratch.nbytes(), StreamRole::ReduceScatter);
    grads.scratch.attach(grads.scratch_slot.data.get());
  }
  CollectiveTag tag{
      &unit.name(),
      context_.trace->add(
          sharded ? TraceOp::ReduceScatter : TraceOp::AllReduce,
          id,
          grads.full.nbytes(),
          context_.pool->stats().in_use_nbytes)};
  const at::Tensor& full = grads.full.full(grads.region);
  if (!sharded) {
    grads.pending = collectives.all_reduce(full, std::move(tag));
  } else if (collectives.exchanges()) {
    grads.pending = collectives.exchange(grads.scratch.full(grads.region), full, std::move(tag));
  } else {
    const at::Tensor& out = adds ? grads.scratch.full(grads.region) : shard_of(grads);
    grads.pending = collectives.reduce_scatter(out, full, std::move(tag));
  }
  in_flight_.emplace_back(id, static_cast<int>(&grads - grads_[id].regions.data()));
}

// Whether the result is added to gradients of earlier backwards.
bool Reducer::adds_to_shard(UnitId id, const RegionGrads& grads) const {
  const auto& params = grads_[id].params;
  return grads.shard.has_value() &&
      std::any_of(params.begin(), params.end(), [](const auto& param) { return param.valid; });
}

// Waits for a reduction and adds its result to the gradient shard.
void Reducer::complete(UnitId id, RegionGrads& grads) {
  grads.pending.wait(*context_.streams);
  if (grads.scratch.attached()) {
    const bool adds = adds_to_shard(id, grads);
    if (adds) {
      zero_invalid(id, grads);
    }
    const int64_t chunks = context_.collectives->exchanges() ? context_.num_shards : 1;
    kernels::sum_chunks(shard_of(grads), grads.scratch.full(grads.region), chunks, adds);
    grads.scratch.detach();
    context_.pool->release(grads.scratch_slot, StreamRole::Compute);
  }
  if (grads.full_slot.held()) {
    grads.full.detach();
    context_.pool->release(grads.full_slot, StreamRole::ReduceScatter);
  }
  for (const int i : units_[id]->layout().regions()[grads.region].params) {
    grads_[id].params[i].valid = true;
    grads_[id].params[i].local = false;
  }
}

void Reducer::complete_all() {
  for (const auto& [id, region] : in_flight_) {
    complete(id, grads_[id].regions[region]);
  }
  in_flight_.clear();
}

// Before an addition: what the memory holds for parameters without a value is left over.
void Reducer::zero_invalid(UnitId id, RegionGrads& grads) {
  for (const int i : units_[id]->layout().regions()[grads.region].params) {
    ParamGrads& param = grads_[id].params[i];
    if (!param.valid) {
      param.grad.zero_();
    }
  }
}

void Reducer::clear_full_grads(UnitId id) {
  for (UnitParam& param : units_[id]->params()) {
    if (param.full.grad().defined()) {
      param.full.mutable_grad().reset();
    }
  }
}

// -- end of a backward ----------------------------------------------------------------------

void Reducer::finish() {
  const at::NoGradGuard no_grad;
  complete_all();
  const bool any_reduced =
      std::any_of(grads_.begin(), grads_.end(), [](const UnitGrads& unit) { return unit.reduced; });
  if (any_reduced && context_.collectives != nullptr && (options_.exchange_used || !asked_used_)) {
    exchange_used();
  }
  for (UnitId id = 0; id < static_cast<UnitId>(grads_.size()); ++id) {
    if (grads_[id].touched) {
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
  std::vector<uint8_t> flags;
  bool any_unused = false;
  for (size_t id = 0; id < grads_.size(); ++id) {
    for (size_t i = 0; i < grads_[id].params.size(); ++i) {
      const bool used = grads_[id].params[i].used;
      flags.push_back(used ? 1 : 0);
      any_unused = any_unused ||
          (grads_[id].reduced && !used && units_[id]->params()[i].full.requires_grad());
    }
  }
  flags.push_back(any_unused ? 1 : 0);
  at::Tensor values = at::zeros({static_cast<int64_t>(flags.size())}, at::kByte);
  std::copy(flags.begin(), flags.end(), values.data_ptr<uint8_t>());
  context_.collectives->all_reduce_max(values);
  const uint8_t* used = values.const_data_ptr<uint8_t>();
  for (UnitGrads& unit : grads_) {
    for (ParamGrads& param : unit.params) {
      param.used = *used++ != 0;
    }
  }
  asked_used_ = true;
  options_.exchange_used = options_.exchange_used || *used != 0;
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
    const bool had_grad = owner.shard.grad().defined();
    param.valid = had_grad || param.used || (unit.reduced && assume_used);
    if (!had_grad && param.valid) {
      if (!unit.reduced && !persistent()) {
        param.grad.zero_(); // held back: only a mark that zero_grad() can remove
      }
      owner.shard.mutable_grad() = param.grad;
    } else if (had_grad && !owner.shard.grad().is_same(param.grad)) {
      owner.shard.mutable_grad() = param.grad;
    }
    param.used = param.used && !unit.reduced;
  }
}

void Reducer::reset() {
  for (const auto& [id, region] : in_flight_) {
    RegionGrads& grads = grads_[id].regions[region];
    grads.pending.wait(*context_.streams);
    grads.scratch.detach();
    context_.pool->release(grads.scratch_slot, StreamRole::Compute);
  }
  in_flight_.clear();
  for (UnitId id = 0; id < static_cast<UnitId>(grads_.size()); ++id) {
    clear_full_grads(id);
    for (RegionGrads& grads : grads_[id].regions) {
      grads.local = false;
      if (grads.full_slot.held()) {
        grads.full.detach();
        context_.pool->release(grads.full_slot, StreamRole::ReduceScatter);
      }
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
