// Element functions and loops that move gradients between parameters and flat buckets.
//
// Raw pointers only; T is float, double, c10::Half or c10::BFloat16. Loops are written so that the
// compiler vectorises them.
#pragma once

#include <cstdint>
#include <cstring>

namespace zerocore::kernels {

// Sums and scales are taken in float for the half types, in T otherwise.
template <typename T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};

// dst = src * scale
template <typename T>
void scale_into(T* __restrict dst, const T* __restrict src, int64_t numel, double scale) {
  using A = typename Accumulate<T>::type;
  if (scale == 1.0) {
    std::memcpy(dst, src, static_cast<size_t>(numel) * sizeof(T));
    return;
  }
  const A factor = static_cast<A>(scale);
  for (int64_t i = 0; i < numel; ++i) {
    dst[i] = static_cast<T>(static_cast<A>(src[i]) * factor);
  }
}

// dst += src * scale
template <typename T>
void scale_add(T* __restrict dst, const T* __restrict src, int64_t numel, double scale) {
  using A = typename Accumulate<T>::type;
  const A factor = static_cast<A>(scale);
  for (int64_t i = 0; i < numel; ++i) {
    dst[i] = static_cast<T>(static_cast<A>(dst[i]) + static_cast<A>(src[i]) * factor);
  }
}

// dst = [dst +] chunk 0 + chunk 1 + ... ; the chunks lie one after the other, `numel` each.
template <typename T>
void sum_chunks(T* dst, const T* chunks, int64_t numel, int64_t num_chunks, bool add) {
  using A = typename Accumulate<T>::type;
  constexpr int64_t kBlock = 1024; // elements summed while they stay in the first-level cache
  A sums[kBlock];
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t count = begin + kBlock < numel ? kBlock : numel - begin;
    for (int64_t i = 0; i < count; ++i) {
      sums[i] = static_cast<A>(chunks[begin + i]);
    }
    for (int64_t chunk = 1; chunk < num_chunks; ++chunk) {
      const T* src = chunks + chunk * numel + begin;
      for (int64_t i = 0; i < count; ++i) {
        sums[i] += static_cast<A>(src[i]);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const A base = add ? static_cast<A>(dst[begin + i]) : A(0);
      dst[begin + i] = static_cast<T>(base + sums[i]);
    }
  }
}

} // namespace zerocore::kernels
