// Numbers of one byte with a scale for each block of them, as they travel.
//
//   | 128 numbers | scale, float32 | 128 numbers | scale, float32 | ...
#pragma once

#include <cstdint>

namespace zerocore {

constexpr int64_t kScaledNumel = 128;
constexpr int64_t kScaledNbytes = kScaledNumel + 4;
// A multiple of blocks that ends on a multiple of 16 bytes.
constexpr int64_t kAlignedScaledNumel = 4 * kScaledNumel;

// Bytes of `numel` numbers, a multiple of a block.
constexpr int64_t scaled_nbytes(int64_t numel) {
  return numel / kScaledNumel * kScaledNbytes;
}

} // namespace zerocore
