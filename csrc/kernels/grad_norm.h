// Adds one element to a sum of squares and to a count of values that are not finite. No torch
// header.
#pragma once

#include "kernels/scaling.h"

namespace zerocore::kernels {

// Squares of a chunk's elements; both are doubles so that a pair can be summed over ranks at once
// (counts are exact up to 2^53).
struct SquareSum {
  double sum = 0;
  double num_nonfinite = 0;
};

template <typename T>
ZEROCORE_HOST_DEVICE AccumulateType<T> squared(T value) {
  const auto wide = static_cast<AccumulateType<T>>(value);
  return wide * wide;
}

// NaN or infinite: the only values whose difference to themselves is not zero.
template <typename T>
ZEROCORE_HOST_DEVICE bool is_nonfinite(T value) {
  const auto wide = static_cast<AccumulateType<T>>(value);
  return !(wide - wide == 0);
}

} // namespace zerocore::kernels
