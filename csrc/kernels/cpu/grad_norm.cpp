// Sums squares on the CPU and counts values that are not finite.
#include "kernels/grad_norm.h"

#include <type_traits>

#include "kernels/cpu/clones.h"
#include "kernels/cpu/fetch.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/loops.h"

namespace zerocore::kernels::cpu {

namespace {

// Sums kept side by side: a compiler may not reorder one floating-point sum, but it may do these
// in one register.
constexpr int64_t kLanes = 32;

template <typename T>
ZEROCORE_CPU_CLONES double sum_squares(const T* src, int64_t numel) {
  AccumulateType<T> sums[kLanes] = {};
  const int64_t even = numel - numel % kLanes;
  for (int64_t begin = 0; begin < even; begin += kLanes) {
    fetch_ahead<kLanes>(src + begin);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += squared(src[begin + lane]);
    }
  }
  for (int64_t i = even; i < numel; ++i) {
    sums[i - even] += squared(src[i]);
  }
  double sum = 0;
  for (const auto lane : sums) {
    sum += static_cast<double>(lane);
  }
  return sum;
}

template <typename T>
ZEROCORE_CPU_CLONES int64_t count_nonfinite(const T* src, int64_t numel) {
  int64_t count = 0;
  for (int64_t i = 0; i < numel; ++i) {
    count += static_cast<int64_t>(is_nonfinite(src[i]));
  }
  return count;
}

template <typename T>
SquareSum square_chunk(const T* src, int64_t numel) {
  SquareSum result;
  int64_t done = 0;
  if constexpr (std::is_same_v<T, c10::Half>) {
    done = square_halves(src, numel, result.sum);
  }
  result.sum += sum_squares(src + done, numel - done);
  // A value that is not finite makes the sum so; a sum may also overflow.
  if (is_nonfinite(result.sum)) {
    result.num_nonfinite = static_cast<double>(count_nonfinite(src, numel));
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
