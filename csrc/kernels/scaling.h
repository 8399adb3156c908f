// Scales and sums one element between tensors and flat buckets. No torch header.
#pragma once

#include <cstdint>

// Marks functions that both the CPU loops and the CUDA kernels compile.
#ifdef __CUDACC__
#define ZEROCORE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ZEROCORE_HOST_DEVICE inline
#endif

namespace zerocore::kernels {

// An element type may be any type that casts to and from its computation type.

// The type in which values are scaled and summed before the conversion to T.
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
  using type = uint8_t; // bytes of any other dtype, which are only moved
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
