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

// The sum of `lanes` neighbouring elements over all chunks, group `index` of each.
template <typename A, int lanes, typename In>
__device__ __forceinline__ Vector<A, lanes> sum_group(
    const In* chunks,
    int64_t index,
    int64_t numel,
    int64_t num_chunks) {
  Vector<A, lanes> sums = {};
#pragma unroll 4 // as many loads in flight
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const auto* in = reinterpret_cast<const Vector<In, lanes>*>(chunks + chunk * numel);
    const Vector<In, lanes> values = in[index];
#pragma unroll
    for (int lane = 0; lane < lanes; ++lane) {
      sums.lane[lane] += static_cast<A>(values.lane[lane]);
    }
  }
  return sums;
}

// One thread sums one group of `lanes` elements; all addresses are multiples of the group's size.
template <typename Out, typename In, int lanes>
__global__ void __launch_bounds__(kThreads)
    accumulate_kernel(const AccumulateArgs<AccumulateType<Out>> args) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= args.numel / lanes) {
    return;
  }
  auto* out = static_cast<Vector<Out, lanes>*>(args.out) + index;
  const auto sums = sum_group<AccumulateType<Out>, lanes>(
      static_cast<const In*>(args.chunks), index, args.numel, args.num_chunks);
  Vector<Out, lanes> result;
  if (args.add) {
    result = *out;
  }
#pragma unroll
  for (int lane = 0; lane < lanes; ++lane) {
    result.lane[lane] = args.add ? scaled_sum(result.lane[lane], sums.lane[lane], args.factor)
                                 : scaled<Out>(sums.lane[lane], args.factor);
  }
  *out = result;
}

template <typename Out, typename In>
void launch_accumulate(const AccumulateCall& call) {
  using A = AccumulateType<Out>;
  constexpr int lanes = kLanes<Out, In>;
  const auto stream = c10::cuda::getCurrentCUDAStream(call.device.index());
  const AccumulateArgs<A> args{
      call.out, call.chunks, call.numel, call.num_chunks, static_cast<A>(call.scale), call.add};
  const auto address =
      reinterpret_cast<uintptr_t>(call.out) | reinterpret_cast<uintptr_t>(call.chunks);
  const bool wide = address % kVectorNbytes == 0 && call.numel % lanes == 0;
  const int64_t num_blocks = (call.numel / (wide ? lanes : 1) + kThreads - 1) / kThreads;
  TORCH_CHECK_VALUE(num_blocks <= kMaxChunks, "accumulate: out is too large for one launch");
  if (wide) {
    accumulate_kernel<Out, In, lanes><<<num_blocks, kThreads, 0, stream>>>(args);
  } else {
    accumulate_kernel<Out, In, 1><<<num_blocks, kThreads, 0, stream>>>(args);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
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
