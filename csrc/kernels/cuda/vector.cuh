// Moves runs of elements with 16-byte accesses, several of them in flight per thread.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/segments.h"

namespace zerocore::kernels::cuda {

constexpr int kThreads = 256; // per block
constexpr int kWarp = 32;
constexpr int kInFlightNbytes = 64; // bytes that a thread loads before it stores the first

// An element function that keeps the value, so that vectors need no unpacking.
struct Keep {};

// `lanes` neighbouring elements, read and written by one access.
template <typename T, int lanes>
struct alignas(sizeof(T) * lanes) Vector {
  static_assert(sizeof(T) * lanes <= kVectorNbytes);
  T lane[lanes];
};

template <typename Dst, typename Src>
constexpr int kLanes = lanes_of(sizeof(Dst), sizeof(Src));

template <typename Dst, typename Src, int lanes, typename F>
__device__ __forceinline__ Vector<Dst, lanes> map_lanes(
    Vector<Dst, lanes> dst,
    const Vector<Src, lanes>& src,
    F f) {
#pragma unroll
  for (int i = 0; i < lanes; ++i) {
    dst.lane[i] = f(dst.lane[i], src.lane[i]);
  }
  return dst;
}

// Groups that a thread loads before it stores the first. Single elements are few or misaligned, so
// their number matters more than their bytes.
template <int group_nbytes, int lanes>
constexpr int kUnroll = lanes == 1 ? 4 : (kInFlightNbytes + group_nbytes - 1) / group_nbytes;

// dst[i] = f(dst[i], src[i]) for count groups of `lanes` elements, with all threads of the block.
// Reads dst only if `reads_dst`.
template <int lanes, bool reads_dst, typename Dst, typename Src, typename F>
__device__ __forceinline__ void map_groups(Dst* dst, const Src* src, int count, F f) {
  constexpr bool keeps_words = std::is_same_v<F, Keep> && sizeof(Src) * lanes == sizeof(uint4);
  using DstVector = std::conditional_t<keeps_words, uint4, Vector<Dst, lanes>>;
  using SrcVector = std::conditional_t<keeps_words, uint4, Vector<Src, lanes>>;
  auto* out = reinterpret_cast<DstVector*>(dst);
  const auto* in = reinterpret_cast<const SrcVector*>(src);
  constexpr int nbytes = sizeof(SrcVector) + (reads_dst ? sizeof(DstVector) : 0);
  constexpr int unroll = kUnroll<nbytes, lanes>;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < count; first += kThreads * unroll) {
    SrcVector values[unroll];
    DstVector results[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (first + u * kThreads < count) {
        values[u] = in[first + u * kThreads];
        if constexpr (reads_dst) {
          results[u] = out[first + u * kThreads];
        }
      }
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (first + u * kThreads < count) {
        if constexpr (std::is_same_v<F, Keep>) {
          out[first + u * kThreads] = values[u];
        } else {
          out[first + u * kThreads] = map_lanes(results[u], values[u], f);
        }
      }
    }
  }
}

// dst[i] = f(dst[i], src[i]) for numel elements (at most a chunk) at any alignment.
template <bool reads_dst, typename Dst, typename Src, typename F>
__device__ __forceinline__ void map_run(Dst* dst, const Src* src, int64_t numel, F f) {
  constexpr int lanes = kLanes<Dst, Src>;
  const VectorSplit split = split_vectors(
      reinterpret_cast<uintptr_t>(dst),
      sizeof(Dst),
      reinterpret_cast<uintptr_t>(src),
      sizeof(Src),
      numel);
  const int head = static_cast<int>(split.head);
  const int body = static_cast<int>(split.num_vectors);
  const int past = head + body * lanes;
  map_groups<1, reads_dst>(dst, src, head, f);
  map_groups<lanes, reads_dst>(dst + head, src + head, body, f);
  map_groups<1, reads_dst>(dst + past, src + past, static_cast<int>(numel) - past, f);
}

} // namespace zerocore::kernels::cuda
