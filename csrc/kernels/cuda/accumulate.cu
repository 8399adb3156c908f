// Sums chunks into a buffer on a GPU, with cast and scale.
#include <c10/cuda/CUDAGuard.h>

#include "kernels/cuda/loops.h"
#include "kernels/cuda/table.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/scaling.h"

namespace zerocore::kernels::cuda {

namespace {

template <typename A>
struct AccumulateArgs {
  void* out;
  const void* chunks;
  int64_t numel;
  int64_t num_chunks;
  A factor;
  bool add;
};

// Groups that a thread loads at a time: kInFlightNbytes for two chunks, the minimum.
template <typename In, int lanes>
constexpr int kGroups = lanes == 1 ? 1 : kInFlightNbytes / (2 * sizeof(Vector<In, lanes>));

// Adds groups `first`, `first + kThreads` ... of every chunk to the sums, in the order of chunks.
template <int groups, int lanes, typename A, typename In>
__device__ __forceinline__ void sum_groups(
    A (&sums)[groups][lanes],
    const In* chunks,
    const AccumulateArgs<A>& args,
    int64_t first,
    int64_t count) {
#pragma unroll(groups == 1 ? 4 : 2) // loads of as many chunks are in flight
  for (int64_t chunk = 0; chunk < args.num_chunks; ++chunk) {
    const auto* in = reinterpret_cast<const Vector<In, lanes>*>(chunks + chunk * args.numel);
    Vector<In, lanes> values[groups] = {};
#pragma unroll
    for (int u = 0; u < groups; ++u) {
      if (first + u * kThreads < count) {
        values[u] = in[first + u * kThreads];
      }
    }
#pragma unroll
    for (int u = 0; u < groups; ++u) {
#pragma unroll
      for (int lane = 0; lane < lanes; ++lane) {
        sums[u][lane] += static_cast<A>(values[u].lane[lane]);
      }
    }
  }
}

// Each thread sums kGroups groups of `lanes` elements, which are kThreads groups apart. All
// addresses are multiples of a group's size.
template <typename Out, typename In, int lanes>
__global__ void __launch_bounds__(kThreads)
    accumulate_kernel(const AccumulateArgs<AccumulateType<Out>> args) {
  constexpr int groups = kGroups<In, lanes>;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * groups + threadIdx.x;
  const int64_t count = args.numel / lanes;
  AccumulateType<Out> sums[groups][lanes] = {};
  sum_groups(sums, static_cast<const In*>(args.chunks), args, first, count);
  auto* out = static_cast<Vector<Out, lanes>*>(args.out);
#pragma unroll
  for (int u = 0; u < groups; ++u) {
    const int64_t index = first + u * kThreads;
    if (index < count) {
      Vector<Out, lanes> result;
      if (args.add) {
        result = out[index];
      }
#pragma unroll
      for (int lane = 0; lane < lanes; ++lane) {
        result.lane[lane] = args.add ? scaled_sum(result.lane[lane], sums[u][lane], args.factor)
                                     : scaled<Out>(sums[u][lane], args.factor);
      }
      out[index] = result;
    }
  }
}

template <typename Out, typename In, int lanes>
void launch_groups(const AccumulateCall& call) {
  using A = AccumulateType<Out>;
  constexpr int64_t per_block = int64_t{kThreads} * kGroups<In, lanes>;
  const int64_t num_blocks = (call.numel / lanes + per_block - 1) / per_block;
  TORCH_CHECK_VALUE(num_blocks <= kMaxChunks, "accumulate: out is too large for one launch");
  const auto stream = c10::cuda::getCurrentCUDAStream(call.device.index());
  const AccumulateArgs<A> args{
      call.out, call.chunks, call.numel, call.num_chunks, static_cast<A>(call.scale), call.add};
  accumulate_kernel<Out, In, lanes><<<num_blocks, kThreads, 0, stream>>>(args);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename Out, typename In>
void launch_accumulate(const AccumulateCall& call) {
  constexpr int lanes = kLanes<Out, In>;
  const bool aligned = reinterpret_cast<uintptr_t>(call.out) % sizeof(Vector<Out, lanes>) == 0 &&
      reinterpret_cast<uintptr_t>(call.chunks) % sizeof(Vector<In, lanes>) == 0;
  if (aligned && call.numel % lanes == 0) {
    launch_groups<Out, In, lanes>(call);
  } else {
    launch_groups<Out, In, 1>(call);
  }
}

} // namespace

void accumulate(const AccumulateCall& call) {
  const c10::cuda::CUDAGuard guard(call.device);
  visit(call.pair, [&](auto types) {
    using T = decltype(types);
    launch_accumulate<typename T::Dst, typename T::Src>(call);
  });
}

} // namespace zerocore::kernels::cuda
