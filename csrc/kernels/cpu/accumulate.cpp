// Sums chunks into a buffer on the CPU, with cast and scale.
#include <algorithm>
#include <type_traits>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/scale.h"
#include "kernels/cpu/vectors.h"

namespace zerocore::kernels::cpu {

namespace {

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

// sums = the sum of elements [begin, begin + count) over all chunks (two or more).
template <typename A, typename In>
void sum_chunks(A* sums, const AccumulateCall& call, int64_t begin, int64_t count) {
  const auto* block = static_cast<const In*>(call.chunks) + begin;
  if constexpr (std::is_same_v<In, c10::Half>) {
    scale_values(sums, block, count, A{1}, false);
    scale_values(sums, block + call.numel, count, A{1}, true);
  } else {
    add_two(sums, block, block + call.numel, count);
  }
  for (int64_t chunk = 2; chunk < call.num_chunks; ++chunk) {
    scale_values(sums, block + chunk * call.numel, count, A{1}, true);
  }
}

template <typename Out, typename In>
void sum_blocks(const AccumulateCall& call) {
  using A = AccumulateType<Out>;
  auto* out = static_cast<Out*>(call.out);
  const auto scale = static_cast<A>(call.scale);
  A sums[kBlockNumel];
  const auto write = [&](Out* values, int64_t begin, int64_t count) {
    sum_chunks<A, In>(sums, call, begin, count);
    scale_values(values, sums, count, scale, call.add);
  };
  if (!call.add && call.numel * static_cast<int64_t>(sizeof(Out)) >= kStreamedNbytes) {
    stream_blocks(out, call.numel, write);
    end_stream();
    return;
  }
  for (int64_t begin = 0; begin < call.numel; begin += kBlockNumel) {
    write(out + begin, begin, std::min(kBlockNumel, call.numel - begin));
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
