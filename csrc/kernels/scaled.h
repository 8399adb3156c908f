// The arithmetic that encodes one element as a one-byte number, with a scale for each block. No
// torch header.
//
// Note [Scaled blocks]
// A block's scale is its largest magnitude divided by the largest number of the format, 448 for
// float8_e4m3fn and 127 for int8. Each element is divided by the scale and rounded to the nearest
// number, ties to even; none exceeds the largest number. If the scale would be subnormal, the block
// is zero. If an element is NaN or infinite, so is the scale, and no element decodes to a finite
// value.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "common/math.h"
#include "kernels/scaling.h"

namespace zerocore::kernels {

enum class ScaledFormat : uint8_t { Float8, Int8 };

ZEROCORE_HOST_DEVICE float largest_number(ScaledFormat format) {
  return format == ScaledFormat::Int8 ? 127.0F : 448.0F;
}

ZEROCORE_HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

ZEROCORE_HOST_DEVICE float float_of(uint32_t bits) {
  float value = 0;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Returns the magnitude's bits: as integers they sort magnitudes, infinity and NaN.
ZEROCORE_HOST_DEVICE uint32_t magnitude(float value) {
  return bits_of(value) & 0x7fffffffU;
}

// The factors that encode and decode a block's elements.
struct BlockScale {
  float inverse = 0;
  float scale = 0;
};

ZEROCORE_HOST_DEVICE BlockScale block_scale(uint32_t largest, ScaledFormat format) {
  const float scale = float_of(largest) / largest_number(format);
  return scale < FLT_MIN ? BlockScale{} : BlockScale{1.0F / scale, scale};
}

// Computes the normal and the subnormal number and selects one: compilers vectorise loops without
// branches.
ZEROCORE_HOST_DEVICE uint8_t to_float8(float value) {
  const uint32_t size = magnitude(value);
  const uint32_t rounded = size + 0x7ffffU + ((size >> 20) & 1U);
  const uint32_t normal = (rounded >> 20) - (120U << 3);
  // Below 2^-6, numbers are multiples of 2^-9, which are the low bits of a float near 2^23.
  const uint32_t subnormal = bits_of(float_of(size) * 512.0F + 8388608.0F);
  const uint32_t number = size < bits_of(0.015625F) ? subnormal : normal;
  return static_cast<uint8_t>((number & 0x7fU) | (bits_of(value) >> 24 & 0x80U));
}

ZEROCORE_HOST_DEVICE float of_float8(uint8_t number) {
  const uint32_t size = number & 0x7fU;
  const float shifted = float_of((size << 20) + (120U << 23));
  const float value = size < 8 ? (shifted - 0.0078125F) * 2.0F : shifted;
  return float_of(bits_of(value) | (static_cast<uint32_t>(number & 0x80U) << 24));
}

ZEROCORE_HOST_DEVICE uint8_t to_int8(float value) {
  return static_cast<uint8_t>(bits_of(value + 12582912.0F) & 0xffU); // rounds like to_float8()
}

ZEROCORE_HOST_DEVICE float of_int8(uint8_t number) {
  return static_cast<float>(static_cast<int8_t>(number));
}

template <ScaledFormat format>
ZEROCORE_HOST_DEVICE uint8_t to_number(float value) {
  return format == ScaledFormat::Int8 ? to_int8(value) : to_float8(value);
}

template <ScaledFormat format>
ZEROCORE_HOST_DEVICE float of_number(uint8_t number) {
  return format == ScaledFormat::Int8 ? of_int8(number) : of_float8(number);
}

// Returns the offset of an element's byte within its blocks.
ZEROCORE_HOST_DEVICE int64_t scaled_place(int64_t element) {
  return element / kScaledNumel * kScaledNbytes + element % kScaledNumel;
}

} // namespace zerocore::kernels
