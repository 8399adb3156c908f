// Sums of squares beside plain loops; the same bits in every order of threads.
#include <cmath>

#include "buffers.h"
#include "cuda_on_cpu.h"
#include "kernels/cuda/loops.h"

namespace checks {

namespace {

using zerocore::kernels::SegmentList;
using zerocore::kernels::SquareSum;
namespace kernels = zerocore::kernels;

template <typename T>
SquareSum run(const SegmentList& list) {
  constexpr SquareSum kUntouched{77, 77};
  const c10::Device device(c10::DeviceType::CPU);
  const int64_t num_chunks = list.num_chunks();
  std::vector<SquareSum> partials(num_chunks + 1, kUntouched);
  SquareSum total = kUntouched;
  if (list.size() > 0) {
    kernels::cuda::square({device, element_of<T>(), list, partials.data()});
  }
  kernels::cuda::total({device, partials.data(), num_chunks, &total});
  expect(partials.back().sum == kUntouched.sum, "norm: wrote outside", num_chunks, list.size());
  return total;
}

template <typename T>
void check_norm(int count, bool with_nonfinite) {
  SegmentList list;
  Buffers<T> buffers;
  double sum = 0;
  double num_nonfinite = 0;
  for (int i = 0; i < count; ++i) {
    buffers.push_back(std::make_unique<Buffer<T>>(some_numel(i), some_past()));
    Buffer<T>& buffer = *buffers.back();
    if (with_nonfinite && i % 5 == 3) {
      const float value = i % 2 == 0 ? NAN : INFINITY;
      buffer[buffer.numel() - 1] = static_cast<T>(value);
      ++num_nonfinite;
    }
    for (int64_t k = 0; k < buffer.numel(); ++k) {
      sum += static_cast<double>(buffer[k]) * static_cast<double>(buffer[k]);
    }
    list.push({nullptr, buffer.data(), buffer.numel()});
  }
  const SquareSum total = run<T>(list);
  const double error = std::abs(total.sum - sum) / (sum + 1e-30);
  expect(with_nonfinite || error <= 1e-6, "norm: another sum", count, list.num_chunks());
  expect(total.num_nonfinite == num_nonfinite, "norm: another count", count, list.num_chunks());
  if (count < 100) { // barriers take most of the time
    const SquareSum again = run<T>(list);
    expect(same_bits(&total, &again, sizeof(total)), "norm: other bits", count, list.num_chunks());
  }
}

} // namespace

void check_norms() {
  for (const int count : {0, 1, 13}) {
    for (const bool with_nonfinite : {false, true}) {
      check_norm<float>(count, with_nonfinite);
      check_norm<c10::BFloat16>(count, with_nonfinite);
      check_norm<c10::Half>(count, with_nonfinite);
      check_norm<double>(count, with_nonfinite);
    }
  }
  if (cuda_on_cpu::counts().launches < 200) { // in one order
    check_norm<float>(1100, false); // more than one table
  }
}

} // namespace checks
