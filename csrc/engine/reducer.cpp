// Packs, reduces and accumulates gradients.
#include "engine/reducer.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "engine/autograd.h"

namespace zerocore {

namespace {

Bucket make_bucket(const Unit& unit, const Layout& layout, int region, int64_t shard) {
  return Bucket(
      layout,
      {region},
      shard,
      unit.context().streams->device(),
      "the gradient of unit '" + unit.name() + "'");
}

Layout scratch_layout(const Unit& unit, bool exchanges) {
  const Layout layout = unit.layout().retyped(&Region::reduce);
  return exchanges ? layout : layout.of_shard(unit.context().shard);
}

} // namespace

Reducer::RegionGrads::RegionGrads(const Unit& unit, int region_, bool exchanges)
    : region(region_),
      full(make_bucket(unit, unit.layout().retyped(&Region::grad), region_, unit.context().shard)),
      scratch(make_bucket(unit, scratch_layout(unit, exchanges), region_, 0)) {
  const UnitContext& context = unit.context();
  if (context.policy.shards_gradients()) {
    const Layout kept = unit.layout().of_shard(context.shard).retyped(&Region::grad);
    shard.emplace(make_bucket(unit, kept, region_, 0));
  }
  if (context.collectives != nullptr && unit.layout().regions()[region_].has_wire()) {
    const Layout wired = unit.layout().retyped(&Region::reduce);
    wire.emplace(make_bucket(unit, wired, region_, context.shard));
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
  if (uses_slots(id) || sums_on_host()) {
    // At most one reduction in flight: its slots are the next one's, its sum over the replicas
    // begins now.
    complete_all();
  }
  for (RegionGrads& grads : grads_[id].regions) {
    if (is_trainable(unit, grads.region)) {
      attach(id, grads, hold);
      pack(id, grads, hold);
    }
  }
  if (!hold && context_.collectives != nullptr) {
    context_.streams->order(StreamRole::ReduceScatter, StreamRole::Compute);
    for (RegionGrads& grads : grads_[id].regions) {
      if (is_trainable(unit, grads.region)) {
        issue(id, grads);
      }
    }
  }
  clear_full_grads(id);
  grads_[id].reduced = grads_[id].reduced || !hold;
}

// Whether a reduction of the unit takes memory from the pool.
bool Reducer::uses_slots(UnitId id) const {
  const auto& regions = grads_[id].regions;
  return context_.policy.shards_gradients() ||
      (context_.policy.shards_optimizer() && context_.collectives->exchanges()) ||
      std::any_of(regions.begin(), regions.end(), [](const RegionGrads& grads) {
           return grads.wire.has_value();
         });
}

// See Note [Replicas].
bool Reducer::sums_on_host() const {
  return context_.replicas != nullptr && !context_.streams->has_streams();
}

bool Reducer::has_grads(UnitId id) const {
  const auto& params = units_[id]->params();
  return std::any_of(params.begin(), params.end(), [](const UnitParam& param) {
    return gradient_of(param.full).defined();
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
    const at::Tensor& current = gradient_of(units_[id]->params()[i].shard);
    if (!current.defined()) {
      param.valid = false;
      param.local = false;
    } else if (!current.is_same(param.grad) && param.grad.defined()) {
      for (RegionGrads& grads : unit.regions) {
        Bucket& home = grads.shard ? *grads.shard : grads.full;
        if (!home.attached()) {
          home.attach(zeroed_memory(home.nbytes()));
        }
      }
      param.grad.copy_(current);
      param.valid = true;
    }
  }
}

void Reducer::issue(UnitId id, RegionGrads& grads) {
  const bool sharded = context_.policy.shards_optimizer();
  if (sharded && (context_.collectives->exchanges() || (grads.adds && !grads.wire.has_value()))) {
    grads.scratch_slot = context_.pool->acquire(
        {id, BlockUse::Scratch, grads.region}, grads.scratch.nbytes(), StreamRole::ReduceScatter);
    grads.scratch.attach(grads.scratch_slot.data);
  }
  grads.pending = start(id, grads);
  in_flight_.emplace_back(id, static_cast<int>(&grads - grads_[id].regions.data()));
  if (context_.replicas != nullptr && context_.streams->has_streams()) {
    grads.pending = start_across(id, result_of(grads));
  }
}

PendingCollective Reducer::start(UnitId id, RegionGrads& grads) {
  Collectives& collectives = *context_.collectives;
  const bool sharded = context_.policy.shards_optimizer();
  const Bucket& sent = grads.wire ? *grads.wire : grads.full;
  const TraceOp op = sharded ? TraceOp::ReduceScatter : TraceOp::AllReduce;
  CollectiveTag tag = units_[id]->tag(op, sent.nbytes());
  const at::Tensor& full = sent.full(grads.region);
  if (!sharded) {
    return collectives.all_reduce(full, std::move(tag));
  }
  return collectives.exchanges()
      ? collectives.exchange(grads.scratch.full(grads.region), full, std::move(tag))
      : collectives.reduce_scatter(result_of(grads), full, std::move(tag));
}

PendingCollective Reducer::start_across(UnitId id, const at::Tensor& sum) {
  const auto nbytes = static_cast<int64_t>(sum.nbytes());
  return context_.replicas->all_reduce(sum, units_[id]->tag(TraceOp::AllReduce, nbytes));
}

// Waits for a reduction and adds its result to the gradient shard.
void Reducer::complete(UnitId id, RegionGrads& grads) {
  grads.pending.wait(*context_.streams);
  if (sums_on_host()) {
    sum_across(id, grads);
  } else if (grads.scratch.attached() || grads.wire) {
    take_result(id, grads);
  }
  release_slots(grads);
  for (const int i : units_[id]->layout().regions()[grads.region].params) {
    grads_[id].params[i].valid = true;
    grads_[id].params[i].local = false;
  }
}

// See Note [Replicas].
void Reducer::sum_across(UnitId id, RegionGrads& grads) {
  const bool in_place = !grads.adds && !grads.wire;
  const at::Tensor& first = in_place ? shard_of(grads) : result_of(grads);
  if (grads.scratch.attached() && context_.collectives->exchanges()) {
    sum(id, first, grads.scratch.full(grads.region), false);
  }
  grads.across = start_across(id, first);
  if (!in_place) {
    grads.across.wait(*context_.streams);
    zero_invalid(id, grads);
    sum(id, shard_of(grads), first, grads.adds);
  }
}

void Reducer::wait_across() {
  if (context_.replicas == nullptr) {
    return;
  }
  for (UnitGrads& unit : grads_) {
    for (RegionGrads& grads : unit.regions) {
      grads.across.wait(*context_.streams);
    }
  }
}

void Reducer::take_result(UnitId id, RegionGrads& grads) {
  zero_invalid(id, grads);
  const bool exchanged = grads.scratch.attached() && context_.collectives->exchanges();
  sum(id,
      shard_of(grads),
      exchanged ? grads.scratch.full(grads.region) : result_of(grads),
      grads.adds);
}

// What a collective leaves where it is not the gradient itself.
const at::Tensor& Reducer::result_of(const RegionGrads& grads) const {
  if (grads.scratch.attached()) {
    return grads.scratch.own(grads.region);
  }
  return grads.wire ? grads.wire->own(grads.region) : shard_of(grads);
}

void Reducer::sum(UnitId id, const at::Tensor& out, const at::Tensor& chunks, bool add) {
  context_.streams->note_read(StreamRole::Compute, chunks, "sums", units_[id]->name());
  context_.streams->note_write(StreamRole::Compute, out, "sums", units_[id]->name());
  kernels::accumulate(out, chunks, out.numel() == 0 ? 1 : chunks.numel() / out.numel(), add);
}

void Reducer::release_slots(RegionGrads& grads) {
  if (grads.scratch.attached()) {
    grads.scratch.detach();
    context_.pool->release(grads.scratch_slot);
  }
  if (grads.wire_slot.held()) {
    grads.wire->detach();
    context_.pool->release(grads.wire_slot);
  }
  if (grads.full_slot.held()) {
    grads.full.detach();
    context_.pool->release(grads.full_slot);
  }
}

void Reducer::complete_all() {
  if (context_.streams->has_streams() && !in_flight_.empty()) {
    // The last one first: on a stream it is behind the others, so one wait is enough.
    const auto [id, region] = in_flight_.back();
    grads_[id].regions[region].pending.wait(*context_.streams);
  }
  for (const auto& [id, region] : in_flight_) {
    complete(id, grads_[id].regions[region]);
  }
  in_flight_.clear();
}

// Before an addition: what the memory holds for parameters without a value is left over.
void Reducer::zero_invalid(UnitId id, const RegionGrads& grads) {
  if (!grads.adds) {
    return;
  }
  for (const int i : units_[id]->layout().regions()[grads.region].params) {
    ParamGrads& param = grads_[id].params[i];
    if (!param.valid) {
      param.grad.zero_();
    }
  }
}

void Reducer::clear_full_grads(UnitId id) {
  for (UnitParam& param : units_[id]->params()) {
    if (gradient_of(param.full).defined()) {
      param.full.mutable_grad().reset();
    }
  }
}

} // namespace zerocore
