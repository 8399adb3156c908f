// Packs the gradients of a region into a bucket.
#include "engine/gradients/gradient_packer.h"

#include "engine/graph/autograd.h"

namespace zerocore {

namespace {

// The parameter's gradient, null for none.
const at::Tensor* checked_gradient(const UnitParam& param) {
  const at::Tensor& grad = gradient_of(param.full);
  if (!grad.defined()) {
    return nullptr;
  }
  TORCH_CHECK_VALUE(
      grad.layout() == at::kStrided && grad.dtype() == param.full.dtype() &&
          !grad.unsafeGetTensorImpl()->is_python_dispatch(),
      "parameter '",
      param.spec.fqn,
      "': its gradient is sparse, of another dtype or of a class around other tensors; expected a "
      "plain one of the parameter's dtype. Use sparse=False.");
  return &grad;
}

} // namespace

void GradientPacker::pack(
    const Unit& unit,
    const Step& step,
    const Reduction& reduction,
    const at::Tensor& bucket) {
  segments_.clear();
  if (unit.layout().by_rows()) {
    add_rows(unit, step, reduction);
  } else {
    add_params(unit, step, reduction);
  }
  unit.context().streams->note_write(StreamRole::Compute, bucket, "packs", unit.name());
  kernels::pack(bucket, segments_, scale_of(step, unit));
}

void GradientPacker::add_params(const Unit& unit, const Step& step, const Reduction& reduction) {
  const Region& region = unit.layout().regions()[step.region];
  int64_t end = 0;
  for (const int i : region.params) {
    const Range place = unit.layout().places()[i].range();
    add_segment(nullptr, 0, {end, place.begin}, false);
    add_param(unit.params()[i], place, reduction.added(step, i));
    end = place.end;
  }
  add_segment(nullptr, 0, {end, region.numel()}, false);
}

// Rank after rank the rows of every parameter, see Note [Shards of rows]. Either all of a parameter
// is added to or nothing.
void GradientPacker::add_rows(const Unit& unit, const Step& step, const Reduction& reduction) {
  const Layout& layout = unit.layout();
  const auto add = [this](const at::Tensor* source, const WireRuns& runs, bool adds) {
    segments_.push_back({source, 0, runs.begin, runs.numel, adds, {runs.run, runs.stride}});
  };
  for (const int i : layout.regions()[step.region].params) {
    const bool adds = !reduction.added(step, i).empty();
    add(checked_gradient(unit.params()[i]), layout.wire_runs(i), adds);
  }
  for (const WireRuns& gap : layout.wire_gaps(step.region)) {
    add(nullptr, gap, false);
  }
}

void GradientPacker::add_param(const UnitParam& param, const Range& place, const Range& added) {
  const at::Tensor* grad = checked_gradient(param);
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
