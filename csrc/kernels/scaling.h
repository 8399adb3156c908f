// Scales and sums one element on its way between tensors and flat buckets. No torch header.
#pragma once

#include <cstdint>

// Marks what the CPU loops and the CUDA kernels both compile.
#ifdef __CUDACC__
#define ZEROCORE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ZEROCORE_HOST_DEVICE inline
#endif

namespace zerocore::kernels {

// The element types are whatever the loops instantiate: anything that casts to and from the type
// that it is computed in.

// The type in which values on their way to T are scaled and summed.
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
