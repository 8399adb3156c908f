// Computes CRC-32 by carry-less products, 64 bytes at a time, if the processor has them; otherwise
// by tables.
#include "io/crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define ZEROCORE_PCLMUL __attribute__((target("sse4.1,pclmul")))
#endif

namespace zerocore::io {

namespace {

constexpr uint32_t kPolynomial = 0xEDB88320U;
constexpr size_t kSlices = 8;
using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

// tables[k][b] is the remainder of byte b followed by k zero bytes.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) {
      rest = (rest >> 1) ^ ((rest & 1U) != 0 ? kPolynomial : 0U);
    }
    tables[0][byte] = rest;
  }
  for (size_t slice = 1; slice < kSlices; ++slice) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[slice - 1][byte];
      tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

// Adds bytes to a state that is not inverted, as add_by_products() does.
uint32_t add_by_tables(uint32_t state, const uint8_t* data, size_t nbytes) {
  for (; nbytes >= kSlices; nbytes -= kSlices, data += kSlices) {
    uint32_t low = 0;
    uint32_t high = 0;
    std::memcpy(&low, data, sizeof(low)); // little-endian, as every host of torch
    std::memcpy(&high, data + 4, sizeof(high));
    low ^= state;
    state = kTables[7][low & 0xFF] ^ kTables[6][(low >> 8) & 0xFF] ^
        kTables[5][(low >> 16) & 0xFF] ^ kTables[4][low >> 24] ^ kTables[3][high & 0xFF] ^
        kTables[2][(high >> 8) & 0xFF] ^ kTables[1][(high >> 16) & 0xFF] ^ kTables[0][high >> 24];
  }
  for (; nbytes > 0; --nbytes, ++data) {
    state = (state >> 8) ^ kTables[0][(state ^ *data) & 0xFF];
  }
  return state;
}

constexpr uint32_t kPolynomialOne = 0x80000000U; // x^0; the bits are reflected

// Returns the product of two polynomials modulo kPolynomial.
uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kPolynomialOne; bit != 0; bit >>= 1) {
    product ^= (a & bit) != 0 ? b : 0U;
    b = (b >> 1) ^ ((b & 1U) != 0 ? kPolynomial : 0U);
  }
  return product;
}

#ifdef ZEROCORE_PCLMUL

constexpr size_t kLane = 16;
constexpr size_t kBlock = 4 * kLane;

bool has_products() {
  static const bool has = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return has;
}

ZEROCORE_PCLMUL inline __m128i load(const uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// Moves the 128 bits of `value` over the bits of `next`, and adds `next`.
ZEROCORE_PCLMUL inline __m128i fold(__m128i value, __m128i factors, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(value, factors, 0x00);
  const __m128i high = _mm_clmulepi64_si128(value, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Reduces 128 bits to 32, by powers of x modulo the polynomial, then by Barrett's method.
ZEROCORE_PCLMUL inline uint32_t reduce(__m128i value, __m128i by_lanes) {
  const __m128i words = _mm_setr_epi32(~0, 0, ~0, 0);
  const __m128i by_32 = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  value = _mm_xor_si128(_mm_srli_si128(value, 8), _mm_clmulepi64_si128(value, by_lanes, 0x10));
  __m128i rest = _mm_srli_si128(value, 4);
  value = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(value, words), by_32, 0x00), rest);
  rest = _mm_clmulepi64_si128(_mm_and_si128(value, words), barrett, 0x10);
  rest = _mm_clmulepi64_si128(_mm_and_si128(rest, words), barrett, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(value, rest), 1));
}

// `nbytes` is a multiple of kLane and at least kBlock. After Gopal and others, "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction".
ZEROCORE_PCLMUL uint32_t add_by_products(uint32_t state, const uint8_t* data, size_t nbytes) {
  const __m128i by_blocks = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_lanes = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  __m128i lanes[4] = {load(data), load(data + 16), load(data + 32), load(data + 48)};
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  for (data += kBlock, nbytes -= kBlock; nbytes >= kBlock; data += kBlock, nbytes -= kBlock) {
    for (size_t lane = 0; lane < 4; ++lane) {
      lanes[lane] = fold(lanes[lane], by_blocks, load(data + lane * kLane));
    }
  }
  __m128i value = lanes[0];
  for (size_t lane = 1; lane < 4; ++lane) {
    value = fold(value, by_lanes, lanes[lane]);
  }
  for (; nbytes >= kLane; data += kLane, nbytes -= kLane) {
    value = fold(value, by_lanes, load(data));
  }
  return reduce(value, by_lanes);
}

#endif

} // namespace

uint32_t crc32_by_tables(uint32_t crc, const void* data, size_t nbytes) {
  return ~add_by_tables(~crc, static_cast<const uint8_t*>(data), nbytes);
}

uint32_t crc32(uint32_t crc, const void* data, size_t nbytes) {
#ifdef ZEROCORE_PCLMUL
  if (nbytes >= kBlock && has_products()) {
    const size_t even = nbytes - nbytes % kLane;
    const auto* bytes = static_cast<const uint8_t*>(data);
    const uint32_t state = add_by_products(~crc, bytes, even);
    return ~add_by_tables(state, bytes + even, nbytes - even);
  }
#endif
  return crc32_by_tables(crc, data, nbytes);
}

uint32_t crc32_joined(uint32_t first, uint32_t second, uint64_t second_nbytes) {
  // Each byte after the first run multiplies its remainder by x^8; the power comes from squaring.
  uint32_t power = kPolynomialOne >> 8;
  for (; second_nbytes > 0; second_nbytes >>= 1) {
    if ((second_nbytes & 1) != 0) {
      first = multiply(first, power);
    }
    power = multiply(power, power);
  }
  return first ^ second;
}

} // namespace zerocore::io
