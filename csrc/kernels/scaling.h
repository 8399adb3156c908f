// Scales and sums one element on its way between tensors and flat buckets. No torch header.
#pragma once

#include <cstdint>

// Marks functions that the CPU loops and the CUDA kernels both compile.
#ifdef __CUDACC__
#define ZEROCORE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ZEROCORE_HOST_DEVICE inline
#endif

namespace zerocore::kernels {

// An element type may be any type that casts to and from the type of its computation.

// The type in which values are scaled and summed before they become T.
template <typename T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <>
struct Accumulate<uint8_t> {
  using type = uint8_t; // bytes of any other dtype: moved only
};
template <typename T>
using AccumulateType = typename Accumulate<T>::type;

// src * factor, in Dst's precision.
template <typename Dst, typename Src>
ZEROCORE_HOST_DEVICE Dst scaled(Src src, AccumulateType<Dst> factor) {
  using A = AccumulateType<Dst>;
  return static_cast<Dst>(static_cast<A>(static_cast<A>(src) * factor));
}

// dst + src * factor, rounded once.
template <typename Dst, typename Src>
ZEROCORE_HOST_DEVICE Dst scaled_sum(Dst dst, Src src, AccumulateType<Dst> factor) {
  using A = AccumulateType<Dst>;
  return static_cast<Dst>(
      static_cast<A>(static_cast<A>(dst) + static_cast<A>(static_cast<A>(src) * factor)));
}

} // namespace zerocore::kernels
