// Sums chunks into a buffer on the CPU, with cast and scale.
#include <algorithm>
#include <type_traits>

#include "kernels/cpu/clones.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/scale.h"

namespace zerocore::kernels::cpu {

namespace {

// Elements summed while they stay in the first-level cache; several pages of each chunk, so that
// the processor sees what to fetch ahead.
constexpr int64_t kBlock = 4096;

// sums[i] = a[i] + b[i]
template <typename A, typename In>
ZEROCORE_CPU_CLONES void add_two(
    A* __restrict sums,
    const In* __restrict a,
    const In* __restrict b,
    int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    sums[i] = static_cast<A>(a[i]) + static_cast<A>(b[i]);
  }
}

// Of two or more chunks.
template <typename Out, typename In>
void sum_blocks(const AccumulateCall& call) {
  using A = AccumulateType<Out>;
  const auto* chunks = static_cast<const In*>(call.chunks);
  A sums[kBlock];
  for (int64_t begin = 0; begin < call.numel; begin += kBlock) {
    const int64_t count = std::min(kBlock, call.numel - begin);
    const In* block = chunks + begin;
    if constexpr (std::is_same_v<In, c10::Half>) {
      scale_values(sums, block, count, A{1}, false);
      scale_values(sums, block + call.numel, count, A{1}, true);
    } else {
      add_two(sums, block, block + call.numel, count);
    }
    for (int64_t chunk = 2; chunk < call.num_chunks; ++chunk) {
      scale_values(sums, block + chunk * call.numel, count, A{1}, true);
    }
    auto* out = static_cast<Out*>(call.out) + begin;
    scale_values(out, sums, count, static_cast<A>(call.scale), call.add);
  }
}

} // namespace

void accumulate(const AccumulateCall& call) {
  visit(call.pair, [&](auto types) {
    using T = decltype(types);
    sum_blocks<typename T::Dst, typename T::Src>(call);
  });
}

} // namespace zerocore::kernels::cpu
