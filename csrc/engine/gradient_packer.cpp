// Packs the gradients of a region into a bucket.
#include "engine/gradient_packer.h"

#include "engine/autograd.h"

namespace zerocore {

namespace {

void check_gradient(const UnitParam& param) {
  const at::Tensor& grad = gradient_of(param.full);
  TORCH_CHECK_VALUE(
      grad.layout() == at::kStrided && grad.dtype() == param.full.dtype(),
      "parameter '",
      param.spec.fqn,
      "': its gradient is sparse or of another dtype, expected a dense one of the parameter's "
      "dtype. Use sparse=False.");
}

} // namespace

void GradientPacker::pack(
    const Unit& unit,
    const GradStep& step,
    const Reduction& reduction,
    const at::Tensor& bucket) {
  const Region& region = unit.layout().regions()[step.region];
  segments_.clear();
  int64_t end = 0;
  for (const int i : region.params) {
    const Range place = unit.layout().places()[i].range();
    add_segment(nullptr, 0, {end, place.begin}, false);
    add_param(unit.params()[i], place, reduction.added(step, i));
    end = place.end;
  }
  add_segment(nullptr, 0, {end, region.numel()}, false);
  unit.context().streams->note_write(StreamRole::Compute, bucket, "packs", unit.name());
  kernels::pack(bucket, segments_, scale_);
}

void GradientPacker::add_param(const UnitParam& param, const Range& place, const Range& added) {
  const at::Tensor* grad = nullptr;
  if (gradient_of(param.full).defined()) {
    grad = &gradient_of(param.full);
    check_gradient(param);
  }
  add_segment(grad, place.begin, {place.begin, added.begin}, false);
  add_segment(grad, place.begin, added, true);
  add_segment(grad, place.begin, {added.end, place.end}, false);
}

// `start`: where the source's first element lies in the region.
void GradientPacker::add_segment(
    const at::Tensor* source,
    int64_t start,
    const Range& range,
    bool add) {
  if (!range.empty() && (source != nullptr || !add)) {
    segments_.push_back({source, range.begin - start, range.begin, range.size(), add});
  }
}

} // namespace zerocore
