// Integer arithmetic on sizes: division, rounding, overflow-checked products.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

#include "common/types.h"

namespace zerocore {

constexpr int64_t ceil_div(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

// a * b for sizes; throws when the product does not fit 63 bits.
inline int64_t checked_mul(int64_t a, int64_t b) {
  int64_t product = 0;
  TORCH_CHECK(!__builtin_mul_overflow(a, b, &product), "size overflow: ", a, " * ", b);
  return product;
}

inline Range intersect(const Range& a, const Range& b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

// A number for a pair of numbers, another one for another pair as far as can be.
constexpr uint64_t mix(uint64_t seed, uint64_t value) {
  return (seed ^ value) * 0x9E3779B97F4A7C15ULL + 1;
}

} // namespace zerocore
