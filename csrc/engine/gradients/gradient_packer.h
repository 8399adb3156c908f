// Packs the gradients of a region into a bucket, scaled, each in its place.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/unit/unit.h"
#include "kernels/ops.h"
#include "plan/reduction.h"

namespace zerocore {

class GradientPacker {
 public:
  // Carries out a Pack, scaled, into `bucket` (1-D, the region's elements, on the compute stream).
  // Gaps and parameters without gradient are zeroed where nothing is to be added to. Throws
  // c10::ValueError for a sparse gradient, or one of another dtype than its parameter.
  void pack(
      const Unit& unit,
      const Step& step,
      const Reduction& reduction,
      const at::Tensor& bucket);

 private:
  void add_params(const Unit& unit, const Step& step, const Reduction& reduction);
  void add_rows(const Unit& unit, const Step& step, const Reduction& reduction);
  void add_param(const UnitParam& param, const Range& place, const Range& added);
  void add_segment(const at::Tensor* source, int64_t start, const Range& range, bool add);

  std::vector<kernels::PackSegment> segments_; // reused
};

} // namespace zerocore
