// Moves segments on a GPU, with cast and scale.
#include <c10/cuda/CUDAGuard.h>

#include "kernels/cuda/loops.h"
#include "kernels/cuda/table.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/scaling.h"

namespace zerocore::kernels::cuda {

namespace {

constexpr int kBlocksPerSm = 4; // limits registers, so that enough loads are in flight

template <typename Dst, typename Src, typename Table>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    copy_kernel(const __grid_constant__ Table table, const AccumulateType<Dst> factor) {
  const BlockWork work = block_work(table);
  auto* dst = static_cast<Dst*>(work.dst) + work.span.begin;
  const auto* src = static_cast<const Src*>(work.src) + work.span.begin;
  const int64_t numel = work.span.end - work.span.begin;
  if (work.src == nullptr) {
    map_run<false>(dst, dst, numel, [](Dst, Dst) { return Dst(0); });
  } else if constexpr (std::is_same_v<Dst, uint8_t>) {
    map_run<false>(dst, src, numel, Keep{});
  } else if (work.add) {
    map_run<true>(dst, src, numel, [=](Dst old, Src x) { return scaled_sum(old, x, factor); });
  } else {
    map_run<false>(dst, src, numel, [=](Dst, Src x) { return scaled<Dst>(x, factor); });
  }
}

template <typename Dst, typename Src>
void launch_copy(const CopyCall& call) {
  const auto stream = c10::cuda::getCurrentCUDAStream(call.device.index());
  const auto factor = static_cast<AccumulateType<Dst>>(call.scale);
  launch_runs(call.segments, [&]<typename Table>(const Table& table, unsigned num_blocks, int) {
    copy_kernel<Dst, Src, Table><<<num_blocks, kThreads, 0, stream>>>(table, factor);
  });
}

} // namespace

void copy(const CopyCall& call) {
  const c10::cuda::CUDAGuard guard(call.device);
  if (call.pair.dst == Element::Byte) {
    launch_copy<uint8_t, uint8_t>(call);
    return;
  }
  visit(call.pair, [&](auto types) {
    using T = decltype(types);
    launch_copy<typename T::Dst, typename T::Src>(call);
  });
}

} // namespace zerocore::kernels::cuda
