// Warps access whole sectors of aligned tensors: all bytes of a sector by one instruction.
#include "buffers.h"
#include "cuda_on_cpu.h"
#include "kernels/cuda/loops.h"

namespace checks {

namespace {

using c10::BFloat16;
using c10::Half;
namespace kernels = zerocore::kernels;

constexpr int kNumel = 3 * kernels::kChunkNumel;
const c10::Device kDevice(c10::DeviceType::CPU);

// `times`: how often the kernel reads or writes each byte.
template <typename T, typename Call>
void expect_whole(const char* what, Buffer<T>& buffer, int times, Call call) {
  const int64_t nbytes = buffer.numel() * static_cast<int64_t>(sizeof(T));
  cuda_on_cpu::watch(buffer.data(), nbytes);
  call();
  const auto traffic = cuda_on_cpu::watched();
  cuda_on_cpu::watch(nullptr, 0);
  expect(traffic.nbytes == times * nbytes, what, traffic.nbytes, nbytes);
  expect(traffic.sector_nbytes == traffic.nbytes, what, traffic.sector_nbytes, traffic.nbytes);
}

template <typename Dst, typename Src>
void check_copy(bool add) {
  Buffer<Dst> out(kNumel, 0);
  Buffer<Src> in(kNumel, 0);
  kernels::SegmentList list;
  list.push({out.data(), in.data(), kNumel, add});
  const auto call = [&] {
    kernels::cuda::copy({kDevice, {element_of<Dst>(), element_of<Src>()}, list, 0.5});
  };
  expect_whole("sectors: copied to", out, add ? 2 : 1, call);
  expect_whole("sectors: copied from", in, 1, call);
}

template <typename Dst, typename Src>
void check_sum(int num_chunks) {
  Buffer<Dst> out(kNumel, 0);
  Buffer<Src> chunks(kNumel * num_chunks, 0);
  const auto call = [&] {
    const kernels::Pair pair{element_of<Dst>(), element_of<Src>()};
    kernels::cuda::accumulate(
        {kDevice, pair, out.data(), chunks.data(), kNumel, num_chunks, 0.5, false});
  };
  expect_whole("sectors: sum", out, 1, call);
  expect_whole("sectors: summed", chunks, 1, call);
}

template <typename Weight, typename Grad, typename Model>
void check_step() {
  Buffer<Weight> weight(kNumel, 0);
  Buffer<Grad> grad(kNumel, 0);
  Buffer<Weight> exp_avg(kNumel, 0);
  Buffer<Weight> exp_avg_sq(kNumel, 0);
  Buffer<Model> model(kNumel, 0);
  float step = 0;
  constexpr bool kCasts = !std::is_same_v<Model, Weight>;
  kernels::AdamWList list;
  list.push(
      {weight.data(),
       grad.data(),
       exp_avg.data(),
       exp_avg_sq.data(),
       kCasts ? model.data() : nullptr,
       &step,
       kNumel});
  const auto call = [&] {
    kernels::BiasCorrection correction{};
    const kernels::AdamWTypes types{element_of<Weight>(), element_of<Grad>(), element_of<Model>()};
    kernels::cuda::adamw(
        {kDevice, types, list, {1e-2, 0.9, 0.999, 1e-8, 0, false}, {}, &correction});
  };
  expect_whole("sectors: weight", weight, 2, call);
  expect_whole("sectors: gradient", grad, 1, call);
  expect_whole("sectors: average of squares", exp_avg_sq, 2, call);
  expect_whole("sectors: model weight", model, kCasts ? 1 : 0, call);
}

template <typename T>
void check_blocks() {
  Buffer<T> values(kNumel, 0);
  Buffer<uint8_t> blocks(zerocore::scaled_nbytes(kNumel), 0);
  const auto format = kernels::ScaledFormat::Float8;
  expect_whole("sectors: encoded", values, 1, [&] {
    const int64_t num_blocks = kNumel / zerocore::kScaledNumel;
    kernels::cuda::encode(
        {kDevice, element_of<T>(), format, blocks.data(), values.data(), num_blocks});
  });
  kernels::SegmentList list;
  list.push({values.data(), blocks.data(), kNumel});
  expect_whole("sectors: decoded", values, 1, [&] {
    kernels::cuda::decode({kDevice, element_of<T>(), format, list, blocks.data()});
  });
}

template <typename Dst>
void check_to() {
  for (const bool add : {false, true}) {
    check_copy<Dst, float>(add);
    check_copy<Dst, Half>(add);
    check_copy<Dst, BFloat16>(add);
  }
  check_sum<Dst, float>(2);
  check_sum<Dst, BFloat16>(3);
  check_blocks<Dst>();
}

} // namespace

void check_sectors() {
  check_to<float>();
  check_to<Half>();
  check_to<BFloat16>();
  check_copy<double, double>(false);
  check_copy<uint8_t, uint8_t>(false);
  check_step<float, float, float>();
  check_step<float, BFloat16, BFloat16>();
  check_step<BFloat16, float, BFloat16>();
  check_step<Half, Half, Half>();
}

} // namespace checks
