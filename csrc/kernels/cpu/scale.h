// The loop of copies and sums: it casts, scales and adds elements.
#pragma once

#include <type_traits>

#include "kernels/cpu/vectors.h"
#include "kernels/scaling.h"

namespace zerocore::kernels::cpu {

constexpr int64_t kGroup = 64; // elements between two prefetches

template <typename Dst, typename Src>
ZEROCORE_CPU_CLONES void scale_into(
    Dst* __restrict dst,
    const Src* __restrict src,
    int64_t numel,
    AccumulateType<Dst> factor) {
  const int64_t even = numel - numel % kGroup;
  for (int64_t begin = 0; begin < even; begin += kGroup) {
    fetch_ahead<kGroup>(src + begin);
    for (int64_t i = begin; i < begin + kGroup; ++i) {
      dst[i] = scaled<Dst>(src[i], factor);
    }
  }
  for (int64_t i = even; i < numel; ++i) {
    dst[i] = scaled<Dst>(src[i], factor);
  }
}

template <typename Dst, typename Src>
ZEROCORE_CPU_CLONES void scale_add(
    Dst* __restrict dst,
    const Src* __restrict src,
    int64_t numel,
    AccumulateType<Dst> factor) {
  for (int64_t i = 0; i < numel; ++i) {
    dst[i] = scaled_sum(dst[i], src[i], factor);
  }
}

// Whether scale_halves() supports this pair of types.
template <typename Dst, typename Src>
constexpr bool kIsOfHalves =
    std::is_same_v<Dst, c10::Half> ? std::is_same_v<Src, c10::Half> || std::is_same_v<Src, float>
                                   : std::is_same_v<Dst, float> && std::is_same_v<Src, c10::Half>;

// dst[i] = or += src[i] * factor; the two do not overlap.
template <typename Dst, typename Src>
void scale_values(Dst* dst, const Src* src, int64_t numel, AccumulateType<Dst> factor, bool add) {
  int64_t done = 0;
  if constexpr (kIsOfHalves<Dst, Src>) {
    done = scale_halves(dst, src, numel, factor, add);
  }
  if (add) {
    scale_add(dst + done, src + done, numel - done, factor);
  } else {
    scale_into(dst + done, src + done, numel - done, factor);
  }
}

} // namespace zerocore::kernels::cpu
