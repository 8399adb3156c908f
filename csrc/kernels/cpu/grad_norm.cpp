// Sums squares on the CPU and counts values that are not finite.
#include "kernels/grad_norm.h"

#include "kernels/cpu/clones.h"
#include "kernels/cpu/loops.h"

namespace zerocore::kernels::cpu {

namespace {

// Sums kept side by side: a compiler may not reorder one floating-point sum, but it may do these
// in one register.
constexpr int64_t kLanes = 32;

template <typename T>
ZEROCORE_CPU_CLONES SquareSum square_chunk(const T* src, int64_t numel) {
  AccumulateType<T> sums[kLanes] = {};
  int32_t nonfinite[kLanes] = {};
  const int64_t even = numel - numel % kLanes;
  for (int64_t begin = 0; begin < even; begin += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += squared(src[begin + lane]);
      nonfinite[lane] += static_cast<int32_t>(is_nonfinite(src[begin + lane]));
    }
  }
  for (int64_t i = even; i < numel; ++i) {
    sums[i - even] += squared(src[i]);
    nonfinite[i - even] += static_cast<int32_t>(is_nonfinite(src[i]));
  }
  SquareSum result;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    result.sum += static_cast<double>(sums[lane]);
    result.num_nonfinite += static_cast<double>(nonfinite[lane]);
  }
  return result;
}

} // namespace

void square(const SquareCall& call) {
  visit(call.element, [&](auto types) {
    using T = typename decltype(types)::Dst;
    const SegmentList& list = call.segments;
    const auto first_chunk = [&](int i) { return list[i].first_chunk; };
    for (int64_t chunk = 0; chunk < list.num_chunks(); ++chunk) {
      const Segment& segment = list[find_segment(first_chunk, list.size(), chunk)];
      const Span span = chunk_span(segment.numel, chunk - segment.first_chunk);
      const auto* src = static_cast<const T*>(segment.src) + span.begin;
      call.partials[chunk] = square_chunk(src, span.end - span.begin);
    }
  });
}

void total(const TotalCall& call) {
  SquareSum sum;
  for (int64_t i = 0; i < call.num_partials; ++i) {
    sum.sum += call.partials[i].sum;
    sum.num_nonfinite += call.partials[i].num_nonfinite;
  }
  *call.out = sum;
}

} // namespace zerocore::kernels::cpu
