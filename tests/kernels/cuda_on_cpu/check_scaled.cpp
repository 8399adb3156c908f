// Numbers of one byte with a scale for each block, beside plain loops over the same elements.
#include <c10/util/Float8_e4m3fn.h>

#include <cmath>

#include "buffers.h"
#include "kernels/cuda/loops.h"

namespace checks {

namespace {

using zerocore::kScaledNbytes;
using zerocore::kScaledNumel;
using zerocore::kernels::ScaledFormat;
using zerocore::kernels::SegmentList;
namespace kernels = zerocore::kernels;

constexpr c10::DeviceType kCpu = c10::DeviceType::CPU;

// By torch's own cast, or by rounding.
uint8_t number_of(float value, ScaledFormat format) {
  if (format == ScaledFormat::Int8) {
    return static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(value)));
  }
  return c10::Float8_e4m3fn(value).x;
}

float value_of(uint8_t number, ScaledFormat format) {
  return format == ScaledFormat::Int8
      ? static_cast<float>(static_cast<int8_t>(number))
      : static_cast<float>(c10::Float8_e4m3fn(number, c10::Float8_e4m3fn::from_bits()));
}

template <typename T>
std::vector<uint8_t> encoded(Buffer<T>& source, ScaledFormat format) {
  std::vector<uint8_t> blocks;
  for (int64_t begin = 0; begin < source.numel(); begin += kScaledNumel) {
    float largest = 0;
    for (int64_t i = 0; i < kScaledNumel; ++i) {
      largest = std::max(largest, std::fabs(static_cast<float>(source[begin + i])));
    }
    const float scale = largest / (format == ScaledFormat::Int8 ? 127.0F : 448.0F);
    const float inverse = scale == 0 ? 0 : 1 / scale;
    for (int64_t i = 0; i < kScaledNumel; ++i) {
      blocks.push_back(number_of(static_cast<float>(source[begin + i]) * inverse, format));
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(&scale);
    blocks.insert(blocks.end(), bytes, bytes + sizeof(scale));
  }
  return blocks;
}

template <typename T>
float decoded(const std::vector<uint8_t>& blocks, int64_t element, ScaledFormat format) {
  const uint8_t* block = blocks.data() + element / kScaledNumel * kScaledNbytes;
  float scale = 0;
  std::memcpy(&scale, block + kScaledNumel, sizeof(scale));
  return static_cast<float>(
      static_cast<T>(value_of(block[element % kScaledNumel], format) * scale));
}

template <typename T>
void check_blocks(int num_blocks, ScaledFormat format) {
  Buffer<T> source(num_blocks * kScaledNumel, 0);
  if (num_blocks > 1) {
    std::fill_n(source.data(), kScaledNumel, T(0));
  }
  Buffer<uint8_t> blocks(num_blocks * kScaledNbytes, 0);
  kernels::cuda::encode({kCpu, element_of<T>(), format, blocks.data(), source.data(), num_blocks});
  const std::vector<uint8_t> wanted = encoded(source, format);
  expect(
      same_bits(wanted.data(), blocks.data(), wanted.size()),
      "encode: another value",
      0,
      num_blocks);
  expect(blocks.intact() && source.intact(), "encode: wrote outside", 0, num_blocks);
  SegmentList list;
  Buffers<T> outs;
  std::vector<int64_t> firsts;
  for (int i = 0; i < 30; ++i) {
    const int first = pick(0, 1) * pick(0, static_cast<int>(source.numel()) - 1);
    const int numel = pick(1, static_cast<int>(source.numel()) - first);
    outs.push_back(std::make_unique<Buffer<T>>(numel, some_past()));
    firsts.push_back(first);
    list.push({outs.back()->data(), blocks.data() + kernels::scaled_place(first), numel});
  }
  kernels::cuda::decode({kCpu, element_of<T>(), format, list, blocks.data()});
  for (size_t i = 0; i < outs.size(); ++i) {
    bool same = true;
    for (int64_t k = 0; k < outs[i]->numel(); ++k) {
      same = same && static_cast<float>((*outs[i])[k]) == decoded<T>(wanted, firsts[i] + k, format);
    }
    expect(same, "decode: another value", static_cast<long>(i), outs[i]->numel());
    expect(outs[i]->intact(), "decode: wrote outside", static_cast<long>(i), outs[i]->numel());
  }
}

// Rows of `run` elements, every `stride`, which is some whole blocks.
template <typename T>
void check_rows(int numel, int run, int stride, ScaledFormat format) {
  const int num_blocks = ((numel - 1) / run + 1) * stride / kScaledNumel;
  Buffer<T> source(num_blocks * kScaledNumel, 0);
  const std::vector<uint8_t> blocks = encoded(source, format);
  constexpr int kFirst = 4;
  Buffer<T> out(numel, some_past());
  SegmentList list;
  list.push(
      {out.data(),
       blocks.data() + kernels::scaled_place(kFirst),
       numel,
       false,
       run,
       static_cast<int64_t>(run * sizeof(T)),
       kernels::scaled_place(stride)});
  kernels::cuda::decode({kCpu, element_of<T>(), format, list, blocks.data()});
  bool same = true;
  for (int i = 0; i < numel; ++i) {
    const int64_t element = kFirst + int64_t(i / run) * stride + i % run;
    same = same && static_cast<float>(out[i]) == decoded<T>(blocks, element, format);
  }
  expect(same && out.intact(), "decode: rows", numel, run);
}

template <typename T>
void check_formats() {
  for (const ScaledFormat format : {ScaledFormat::Float8, ScaledFormat::Int8}) {
    for (const int num_blocks : {1, 7, 9, 70}) {
      check_blocks<T>(num_blocks, format);
    }
    check_rows<T>(1000, 100, 2 * kScaledNumel, format);
    check_rows<T>(20'000, 9'000, 9'088, format);
  }
}

} // namespace

void check_scaled() {
  check_formats<float>();
  check_formats<c10::Half>();
  check_formats<c10::BFloat16>();
}

} // namespace checks
