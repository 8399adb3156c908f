// Integer arithmetic on sizes: division, rounding, overflow-checked products; the units of files
// and mappings, and of numbers of one byte as they travel.
#pragma once

#include <c10/util/Exception.h>
#include <unistd.h>

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

// Offsets, sizes and addresses of direct transfers are multiples of it, as O_DIRECT requires.
constexpr int64_t kDiskAlignment = 4096;

// A multiple of both the pages of memory and what direct transfers are made of.
inline int64_t page_nbytes() {
  return std::max<int64_t>(kDiskAlignment, ::sysconf(_SC_PAGESIZE));
}

// Numbers of one byte travel with a scale for each block of them:
//
//   | 128 numbers | scale, float32 | 128 numbers | scale, float32 | ...
constexpr int64_t kScaledNumel = 128;
constexpr int64_t kScaledNbytes = kScaledNumel + 4;
// A multiple of blocks that ends on a multiple of 16 bytes.
constexpr int64_t kAlignedScaledNumel = 4 * kScaledNumel;

// Bytes of `numel` numbers, a multiple of a block.
constexpr int64_t scaled_nbytes(int64_t numel) {
  return numel / kScaledNumel * kScaledNbytes;
}

} // namespace zerocore
