// Packing: which parts of a gradient go where in the bucket, and whether they are added.
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "engine/autograd.h"
#include "engine/reducer.h"

namespace zerocore {

// Gaps and parameters without gradient are zeroed.
void Reducer::pack(UnitId id, RegionGrads& grads, bool hold) {
  const Unit& unit = *units_[id];
  const Region& region = unit.layout().regions()[grads.region];
  const bool to_wire = grads.wire && !hold && !grads.local;
  segments_.clear();
  int64_t end = 0;
  for (const int i : region.params) {
    const ParamPlace& place = unit.layout().places()[i];
    add_segment(nullptr, 0, {end, place.offset}, false);
    add_segments(id, grads, i, to_wire);
    end = place.offset + place.numel;
  }
  add_segment(nullptr, 0, {end, region.numel()}, false);
  const at::Tensor& bucket = (to_wire ? *grads.wire : grads.full).full(grads.region);
  context_.streams->note_write(StreamRole::Compute, bucket, "packs", unit.name());
  kernels::pack(bucket, segments_, scale());
  if (grads.wire && !hold && !to_wire) {
    put_on_wire(id, grads);
  }
  // Reduced values that lie in memory of their own, or in a part that the sums leave alone.
  grads.adds = (grads.shard || to_wire) && any_valid(id, grads);
  grads.local = hold;
  for (const int i : region.params) {
    grads_[id].params[i].local = true;
  }
}

void Reducer::put_on_wire(UnitId id, RegionGrads& grads) {
  const at::Tensor& sums = grads.full.full(grads.region);
  const at::Tensor& wire = grads.wire->full(grads.region);
  context_.streams->note_read(StreamRole::Compute, sums, "casts", units_[id]->name());
  context_.streams->note_write(StreamRole::Compute, wire, "casts", units_[id]->name());
  kernels::cast(wire, {sums}, {0});
}

bool Reducer::any_valid(UnitId id, const RegionGrads& grads) const {
  const auto& indices = units_[id]->layout().regions()[grads.region].params;
  return std::any_of(
      indices.begin(), indices.end(), [&](int i) { return grads_[id].params[i].valid; });
}

// Memory for what is packed and what comes of it.
void Reducer::attach(UnitId id, RegionGrads& grads, bool hold) {
  if (grads.pending.pending()) {
    complete(id, grads); // a second reduction in one backward
  }
  grads.across.wait(*context_.streams);
  if (grads.shard && !grads.shard->attached()) {
    grads.shard->attach(zeroed_memory(grads.shard->nbytes()));
  }
  if (grads.wire && !hold) {
    grads.wire_slot = context_.pool->acquire(
        {id, BlockUse::Wire, grads.region}, grads.wire->nbytes(), StreamRole::Compute);
    grads.wire->attach(grads.wire_slot.data);
  }
  // Where gradients are kept, or the sums of several backwards.
  if (persistent() || !grads.wire || hold || grads.local) {
    attach_full(id, grads);
  }
}

void Reducer::attach_full(UnitId id, RegionGrads& grads) {
  if (grads.full.attached()) {
    return;
  }
  if (persistent()) {
    grads.full.attach(zeroed_memory(grads.full.nbytes()));
  } else {
    grads.full_slot = context_.pool->acquire(
        {id, BlockUse::Gradients, grads.region}, grads.full.nbytes(), StreamRole::Compute);
    grads.full.attach(grads.full_slot.data);
  }
}

// What the bucket needs for one parameter: its gradient, added to what must be kept.
void Reducer::add_segments(UnitId id, const RegionGrads& grads, int index, bool to_wire) {
  const UnitParam& param = units_[id]->params()[index];
  const ParamPlace& place = units_[id]->layout().places()[index];
  ParamGrads& state = grads_[id].params[index];
  const at::Tensor* grad = nullptr;
  if (gradient_of(param.full).defined()) {
    grad = &gradient_of(param.full);
    check_gradient(param);
    state.used = true;
  }
  const Range kept =
      to_wire ? Range{place.offset, place.offset} : add_range(*units_[id], grads, index);
  add_segment(grad, place.offset, {place.offset, kept.begin}, false);
  add_segment(grad, place.offset, kept, true);
  add_segment(grad, place.offset, {kept.end, place.offset + place.numel}, false);
}

void Reducer::add_segment(const at::Tensor* source, int64_t start, Range range, bool add) {
  if (!range.empty() && (source != nullptr || !add)) {
    segments_.push_back({source, range.begin - start, range.begin, range.size(), add});
  }
}

// The elements of the region where the bucket's value for the parameter is kept and added to.
Range Reducer::add_range(const Unit& unit, const RegionGrads& grads, int param) const {
  const ParamPlace& place = unit.layout().places()[param];
  const ParamGrads& state = grads_[unit.id()].params[param];
  if (grads.local) {
    return state.local ? place.range() : Range{place.offset, place.offset};
  }
  // A reduced value counts once in the next sum: on one of the ranks that own it.
  const bool first_replica = context_.replicas == nullptr || context_.replicas->rank() == 0;
  const bool owns = first_replica &&
      (context_.policy.shards_optimizer() || context_.collectives == nullptr ||
       context_.collectives->rank() == 0);
  if (!persistent() || !state.valid || !owns) {
    return {place.offset, place.offset};
  }
  const Range own = unit.layout().regions()[grads.region].shard_range(context_.shard);
  const Range kept = intersect(place.range(), own);
  return kept.empty() ? Range{place.offset, place.offset} : kept;
}

void Reducer::check_gradient(const UnitParam& param) const {
  const at::Tensor& grad = gradient_of(param.full);
  TORCH_CHECK_VALUE(
      grad.layout() == at::kStrided && grad.dtype() == param.full.dtype(),
      "parameter '",
      param.spec.fqn,
      "': its gradient is sparse or of another dtype, expected a dense one of the parameter's "
      "dtype. Use sparse=False.");
}

double Reducer::scale() const {
  return 1.0 / static_cast<double>(context_.world_size());
}

c10::DataPtr Reducer::zeroed_memory(int64_t nbytes) const {
  const c10::Device device = context_.streams->device();
  return at::zeros({nbytes}, at::TensorOptions().dtype(at::kByte).device(device))
      .storage()
      .set_data_ptr(c10::DataPtr(nullptr, device));
}

} // namespace zerocore
