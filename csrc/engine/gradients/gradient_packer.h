// Packs the gradients of a region into a bucket, scaled, each in its place.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/unit/unit.h"
#include "kernels/ops.h"
#include "plan/reduction.h"

namespace zerocore {

// Of the unit's gradient scale, the factor that a step applies: see Note [Scale of gradients].
double scale_of(const GradStep& step, const Unit& unit);

// Whether a gradient of the region has the same bits, unless it is too small or too large, if sums
// of it are scaled in its place.
bool scales_exactly(const Unit& unit, int region);

class GradientPacker {
 public:
  // Carries out a Pack, scaled, into `bucket` (1-D, the region's elements, on the compute stream).
  // Gaps and parameters without gradient are zeroed where nothing is to be added to. Throws
  // c10::ValueError for a sparse gradient, or one of another dtype than its parameter.
  void pack(
      const Unit& unit,
      const GradStep& step,
      const Reduction& reduction,
      const at::Tensor& bucket);
  // Bytes of gradients that were copied so far.
  int64_t copied_nbytes() const {
    return copied_nbytes_;
  }

 private:
  void add_params(const Unit& unit, const GradStep& step, const Reduction& reduction);
  void add_rows(const Unit& unit, const GradStep& step, const Reduction& reduction);
  void add_param(const UnitParam& param, const Range& place, const Range& added);
  void add_segment(const at::Tensor* source, int64_t start, const Range& range, bool add);

  bool is_in_place(const at::Tensor& grad, const Range& place) const;

  std::vector<kernels::PackSegment> segments_; // reused
  const at::Tensor* bucket_ = nullptr; // of a Pack that scales nothing
  int64_t copied_nbytes_ = 0;
};

} // namespace zerocore
