// Squares one element of a gradient, and finds non-finite values. No torch header.
#pragma once

#include "kernels/scaling.h"

namespace zerocore::kernels {

// The sums of a chunk. Both are doubles, so that one all-reduce sums the pair over ranks (counts
// are exact up to 2^53).
struct SquareSum {
  double sum = 0;
  double num_nonfinite = 0;
};

template <typename T>
ZEROCORE_HOST_DEVICE AccumulateType<T> squared(T value) {
  const auto wide = static_cast<AccumulateType<T>>(value);
  return wide * wide;
}

// Returns whether the value is NaN or infinite: only then x - x is not zero.
template <typename T>
ZEROCORE_HOST_DEVICE bool is_nonfinite(T value) {
  const auto wide = static_cast<AccumulateType<T>>(value);
  return !(wide - wide == 0);
}

} // namespace zerocore::kernels
