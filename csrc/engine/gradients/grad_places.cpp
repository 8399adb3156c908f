// Where layers write gradients in a backward.
#include "engine/gradients/grad_places.h"

#include <utility>

#include "engine/graph/autograd.h"

namespace zerocore {

GradPlaces::GradPlaces(const Units& units) {
  for (const auto& unit : units) {
    given_.emplace_back(unit->params().size());
  }
}

at::Tensor GradPlaces::give(const Unit& unit, int param, const at::Tensor& bucket) {
  const at::Tensor& full = unit.params()[param].full;
  std::optional<Given>& given = given_[unit.id()][param];
  const bool is_first = !given && !gradient_of(full).defined();
  if (!is_first || bucket.dtype() != full.dtype() || !full.is_contiguous() ||
      unit.context().streams->compute_stream() != stream_) {
    return {};
  }
  const int64_t begin = bucket.storage_offset() + unit.layout().places()[param].range().begin;
  const at::Tensor place =
      tensor_over(bucket.storage(), full.scalar_type(), begin, full.sizes(), full.strides());
  given.emplace(place.getIntrusivePtr());
  return place;
}

void GradPlaces::take_back(const Unit& unit) {
  for (size_t i = 0; i < unit.params().size(); ++i) {
    const std::optional<Given> given = std::exchange(given_[unit.id()][i], std::nullopt);
    if (!given) {
      continue;
    }
    const at::Tensor tensor(given->lock());
    const at::Tensor& grad = gradient_of(unit.params()[i].full);
    if (tensor.defined() && !(grad.defined() && grad.is_alias_of(tensor))) {
      tensor.set_(tensor.clone());
    }
  }
}

} // namespace zerocore
