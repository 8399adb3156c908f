// Sums squares on a GPU and counts values that are not finite.
//
// Each block writes a partial sum, and one block adds the partial sums in a fixed order. There are
// no atomics and the order does not depend on addresses, so equal inputs give equal bits.
#include "kernels/grad_norm.h"

#include <c10/cuda/CUDAGuard.h>

#include "kernels/cuda/loops.h"
#include "kernels/cuda/table.cuh"
#include "kernels/cuda/vector.cuh"

namespace zerocore::kernels::cuda {

namespace {

constexpr int kTotalThreads = 1024;

__device__ __forceinline__ SquareSum operator+(const SquareSum& a, const SquareSum& b) {
  return {a.sum + b.sum, a.num_nonfinite + b.num_nonfinite};
}

__device__ __forceinline__ SquareSum sum_of_warp(SquareSum value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const SquareSum other{
        __shfl_down_sync(~0u, value.sum, distance),
        __shfl_down_sync(~0u, value.num_nonfinite, distance)};
    value = value + other;
  }
  return value;
}

// Returns the sum over all `threads` of the block, in thread 0.
template <int threads>
__device__ __forceinline__ SquareSum sum_of_block(SquareSum value) {
  __shared__ SquareSum warps[threads / kWarp];
  value = sum_of_warp(value);
  if (threadIdx.x % kWarp == 0) {
    warps[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  if (threadIdx.x < kWarp) {
    value = sum_of_warp(threadIdx.x < threads / kWarp ? warps[threadIdx.x] : SquareSum{});
  }
  return value;
}

// One thread's share of a chunk.
template <typename T>
struct ThreadSum {
  AccumulateType<T> sum = 0;
  int num_nonfinite = 0;

  __device__ __forceinline__ void add(T value) {
    sum += squared(value);
    num_nonfinite += static_cast<int>(is_nonfinite(value));
  }
};

template <bool aligned, int lanes, typename T>
__device__ __forceinline__ Vector<T, lanes> load_group(const T* src) {
  Vector<T, lanes> group;
  if constexpr (aligned) {
    group = *reinterpret_cast<const Vector<T, lanes>*>(src);
  } else {
#pragma unroll
    for (int lane = 0; lane < lanes; ++lane) {
      group.lane[lane] = src[lane];
    }
  }
  return group;
}

// Adds `count` groups of `lanes` elements to the threads' shares. A thread gets the same elements
// at any alignment.
template <bool aligned, int lanes, typename T>
__device__ __forceinline__ void add_groups(ThreadSum<T>& share, const T* src, int count) {
  constexpr int unroll = kUnroll<sizeof(T) * lanes, lanes>;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < count; first += kThreads * unroll) {
    Vector<T, lanes> values[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (first + u * kThreads < count) {
        values[u] = load_group<aligned, lanes>(src + (first + u * kThreads) * lanes);
      }
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (first + u * kThreads < count) {
#pragma unroll
        for (int lane = 0; lane < lanes; ++lane) {
          share.add(values[u].lane[lane]);
        }
      }
    }
  }
}

template <typename T, int capacity>
__global__ void __launch_bounds__(kThreads)
    square_kernel(const __grid_constant__ SegmentTable<capacity> table, SquareSum* partials) {
  constexpr int lanes = kLanes<T, T>;
  const BlockWork work = block_work(table);
  const T* src = static_cast<const T*>(work.src) + work.span.begin;
  const int numel = static_cast<int>(work.span.end - work.span.begin);
  const int groups = numel / lanes;
  ThreadSum<T> share;
  if (reinterpret_cast<uintptr_t>(src) % kVectorNbytes == 0) {
    add_groups<true, lanes>(share, src, groups);
  } else {
    add_groups<false, lanes>(share, src, groups);
  }
  add_groups<true, 1>(share, src + groups * lanes, numel - groups * lanes);
  const SquareSum sum = sum_of_block<kThreads>(
      {static_cast<double>(share.sum), static_cast<double>(share.num_nonfinite)});
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = sum;
  }
}

__global__ void __launch_bounds__(kTotalThreads)
    total_kernel(const SquareSum* partials, int64_t num_partials, SquareSum* out) {
  SquareSum sum;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < num_partials; i += kTotalThreads) {
    sum = sum + partials[i];
  }
  sum = sum_of_block<kTotalThreads>(sum);
  if (threadIdx.x == 0) {
    *out = sum;
  }
}

} // namespace

void square(const SquareCall& call) {
  const c10::cuda::CUDAGuard guard(call.device);
  const auto stream = c10::cuda::getCurrentCUDAStream(call.device.index());
  visit(call.element, [&](auto types) {
    using T = typename decltype(types)::Dst;
    launch_all(
        call.segments,
        [&]<int capacity>(const SegmentTable<capacity>& table, unsigned num_blocks, int begin) {
          SquareSum* partials = call.partials + call.segments[begin].first_chunk;
          square_kernel<T, capacity><<<num_blocks, kThreads, 0, stream>>>(table, partials);
        });
  });
}

void total(const TotalCall& call) {
  const c10::cuda::CUDAGuard guard(call.device);
  const auto stream = c10::cuda::getCurrentCUDAStream(call.device.index());
  total_kernel<<<1, kTotalThreads, 0, stream>>>(call.partials, call.num_partials, call.out);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

} // namespace zerocore::kernels::cuda
