// Sums chunks into a buffer on the CPU, with cast and scale.
#include <algorithm>

#include "kernels/cpu/clones.h"
#include "kernels/cpu/loops.h"
#include "kernels/flatten.h"

namespace zerocore::kernels::cpu {

namespace {

constexpr int64_t kBlock = 1024; // elements summed while they stay in the first-level cache

// sums[i] = or += chunk[i]
template <typename A, typename In>
ZEROCORE_CPU_CLONES void add_block(A* __restrict sums, const In* chunk, int64_t count, bool first) {
  if (first) {
    for (int64_t i = 0; i < count; ++i) {
      sums[i] = static_cast<A>(chunk[i]);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      sums[i] += static_cast<A>(chunk[i]);
    }
  }
}

// out[i] = [out[i] +] sums[i] * factor
template <typename Out, typename A>
ZEROCORE_CPU_CLONES void store_block(
    Out* __restrict out,
    const A* sums,
    int64_t count,
    A factor,
    bool add) {
  if (add) {
    for (int64_t i = 0; i < count; ++i) {
      out[i] = scaled_sum(out[i], sums[i], factor);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      out[i] = scaled<Out>(sums[i], factor);
    }
  }
}

template <typename Out, typename In>
void sum_blocks(const AccumulateCall& call) {
  using A = AccumulateType<Out>;
  const auto* chunks = static_cast<const In*>(call.chunks);
  A sums[kBlock];
  for (int64_t begin = 0; begin < call.numel; begin += kBlock) {
    const int64_t count = std::min(kBlock, call.numel - begin);
    for (int64_t chunk = 0; chunk < call.num_chunks; ++chunk) {
      add_block(sums, chunks + chunk * call.numel + begin, count, chunk == 0);
    }
    auto* out = static_cast<Out*>(call.out) + begin;
    store_block(out, sums, count, static_cast<A>(call.scale), call.add);
  }
}

} // namespace

void accumulate(const AccumulateCall& call) {
  if (call.num_chunks == 1) {
    SegmentList segments;
    segments.push(call.out, call.chunks, call.numel, call.add);
    copy({call.device, call.pair, segments, call.scale});
    return;
  }
  visit(call.pair, [&](auto types) {
    using T = decltype(types);
    sum_blocks<typename T::Dst, typename T::Src>(call);
  });
}

} // namespace zerocore::kernels::cpu
