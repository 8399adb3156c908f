// Encodes and decodes scaled blocks on the CPU.
#include "kernels/scaled.h"

#include <algorithm>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vectors.h"
#include "kernels/scaling.h"

namespace zerocore::kernels::cpu {

namespace {

constexpr int64_t kBlocksPerTask = 1024;

template <ScaledFormat format, typename Src>
ZEROCORE_CPU_CLONES void encode_block(uint8_t* __restrict block, const Src* __restrict src) {
  float values[kScaledNumel];
  uint32_t largest = 0;
  for (int64_t i = 0; i < kScaledNumel; ++i) {
    values[i] = static_cast<float>(src[i]);
    largest = std::max(largest, magnitude(values[i]));
  }
  const BlockScale scale = block_scale(largest, format);
  for (int64_t i = 0; i < kScaledNumel; ++i) {
    block[i] = to_number<format>(values[i] * scale.inverse);
  }
  std::memcpy(block + kScaledNumel, &scale.scale, sizeof(float));
}

template <ScaledFormat format, typename Dst>
ZEROCORE_CPU_CLONES void decode_numbers(
    Dst* __restrict dst,
    const uint8_t* __restrict numbers,
    int64_t numel,
    float scale) {
  for (int64_t i = 0; i < numel; ++i) {
    dst[i] = scaled<Dst>(of_number<format>(numbers[i]), scale);
  }
}

template <ScaledFormat format, typename Dst>
void decode_segment(const uint8_t* blocks, const Segment& segment) {
  const int64_t past = static_cast<const uint8_t*>(segment.src) - blocks;
  const uint8_t* block = blocks + past / kScaledNbytes * kScaledNbytes;
  int64_t first = past % kScaledNbytes;
  auto* dst = static_cast<Dst*>(segment.dst);
  for (int64_t done = 0; done < segment.numel; block += kScaledNbytes, first = 0) {
    const int64_t count = std::min(kScaledNumel - first, segment.numel - done);
    float scale = 0;
    std::memcpy(&scale, block + kScaledNumel, sizeof(scale));
    decode_numbers<format>(dst + done, block + first, count, scale);
    done += count;
  }
}

} // namespace

void encode(const EncodeCall& call) {
  visit_scaled(call.element, call.format, [&]<typename Src, ScaledFormat format>() {
    auto* blocks = static_cast<uint8_t*>(call.blocks);
    const auto* src = static_cast<const Src*>(call.src);
    at::parallel_for(0, call.num_blocks, kBlocksPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        encode_block<format>(blocks + i * kScaledNbytes, src + i * kScaledNumel);
      }
    });
  });
}

void decode(const DecodeCall& call) {
  visit_scaled(call.element, call.format, [&]<typename Dst, ScaledFormat format>() {
    for (const Segment& segment : call.segments) {
      for_each_run(segment, [&](const Segment& run) {
        decode_segment<format, Dst>(static_cast<const uint8_t*>(call.blocks), run);
      });
    }
  });
}

} // namespace zerocore::kernels::cpu
