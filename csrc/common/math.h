// Integer arithmetic on sizes: division, rounding and checked products. Also the block sizes of
// direct transfers and of one-byte encodings.
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

// Hashes a pair of numbers.
constexpr uint64_t mix(uint64_t seed, uint64_t value) {
  return (seed ^ value) * 0x9E3779B97F4A7C15ULL + 1;
}

// O_DIRECT requires multiples of this for offsets, sizes and addresses.
constexpr int64_t kDiskAlignment = 4096;

// Returns a multiple of both the page size and kDiskAlignment.
inline int64_t page_nbytes() {
  return std::max<int64_t>(kDiskAlignment, ::sysconf(_SC_PAGESIZE));
}

// Encoded values are one byte each. Every block of 128 of them ends with its float32 scale:
//
//   | 128 numbers | scale, float32 | 128 numbers | scale, float32 | ...
constexpr int64_t kScaledNumel = 128;
constexpr int64_t kScaledNbytes = kScaledNumel + 4;
// Four blocks: the smallest number of blocks whose bytes are a multiple of 16.
constexpr int64_t kAlignedScaledNumel = 4 * kScaledNumel;

// Returns the encoded bytes of `numel` values, which fill whole blocks.
constexpr int64_t scaled_nbytes(int64_t numel) {
  return numel / kScaledNumel * kScaledNbytes;
}

} // namespace zerocore
