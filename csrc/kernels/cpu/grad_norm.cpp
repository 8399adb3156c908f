// Sums squares on the CPU and counts values that are not finite.
#include "kernels/grad_norm.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vectors.h"

namespace zerocore::kernels::cpu {

namespace {

constexpr int64_t kChunksPerTask = 16;

// The number of parallel sums: a compiler may not reorder one floating-point sum, but it may
// compute several in one register.
constexpr int64_t kLanes = 32;

// Returns the number of elements before the first cache line that starts within src. A gradient may
// start anywhere in a bucket, and loads across lines would touch two each.
template <typename T>
int64_t numel_before_line(const T* src, int64_t numel) {
  const size_t past = reinterpret_cast<uintptr_t>(src) % kLineNbytes;
  const size_t before = (kLineNbytes - past) % kLineNbytes / sizeof(T);
  return std::min(numel, static_cast<int64_t>(before));
}

// Element i belongs to the sum of lane i % kLanes, so the bits do not depend on the address of src.
// The loop begins at a line, with lane `head`, so its sums are rotated by `head`.
template <typename T>
ZEROCORE_CPU_CLONES double sum_squares(const T* src, int64_t numel) {
  AccumulateType<T> sums[kLanes] = {};
  const int64_t head = numel_before_line(src, numel);
  const int64_t tail = numel - (numel - head) % kLanes;
  for (int64_t i = 0; i < head; ++i) {
    sums[kLanes - head + i] += squared(src[i]);
  }
  for (int64_t begin = head; begin < tail; begin += kLanes) {
    fetch_ahead<kLanes>(src + begin);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += squared(src[begin + lane]);
    }
  }
  for (int64_t i = tail; i < numel; ++i) {
    sums[i - tail] += squared(src[i]);
  }
  double sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    sum += static_cast<double>(sums[(lane + kLanes - head) % kLanes]);
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
  // A non-finite sum means a NaN or an infinity, or an overflow.
  if (is_nonfinite(result.sum)) {
    result.num_nonfinite = static_cast<double>(count_nonfinite(src, numel));
  }
  return result;
}

} // namespace

void square(const SquareCall& call) {
  visit(call.element, [&](auto types) {
    using T = typename decltype(types)::Dst;
    // Each chunk has its own sum, so the bits do not depend on the threads.
    for_each_chunk(call.segments, kChunksPerTask, [&](int64_t chunk, int index, Range span) {
      const auto* src = static_cast<const T*>(call.segments[index].src) + span.begin;
      call.partials[chunk] = square_chunk(src, span.end - span.begin);
    });
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
