// Encodes and decodes scaled blocks on a GPU.
//
// A warp encodes one block at a time; each lane has four numbers. Blocks of 132 bytes are adjacent,
// so aligned accesses have at most four bytes. A thread therefore loads several words before it
// stores.
#include "kernels/scaled.h"

#include <c10/cuda/CUDAGuard.h>

#include <type_traits>

#include "kernels/cuda/loops.h"
#include "kernels/cuda/table.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/scaling.h"

namespace zerocore::kernels::cuda {

namespace {

constexpr int kWordLanes = 4; // numbers in a word
constexpr int kBlocksPerWarp = 4;
constexpr int kWordsInFlight = 8; // per thread; a block of threads loads a whole chunk
static_assert(kWarp * kWordLanes == kScaledNumel);

__device__ __forceinline__ uint32_t largest_of_warp(uint32_t value) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const uint32_t other = __shfl_xor_sync(~0u, value, lanes);
    value = other > value ? other : value;
  }
  return value;
}

// Writes one block with all lanes of a warp, four numbers each.
template <ScaledFormat format, typename Src>
__device__ __forceinline__ void encode_block(
    uint8_t* block,
    const Vector<Src, kWordLanes>& values,
    int lane) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kWordLanes; ++i) {
    const uint32_t size = magnitude(static_cast<float>(values.lane[i]));
    largest = size > largest ? size : largest;
  }
  const BlockScale scale = block_scale(largest_of_warp(largest), format);
  Vector<uint8_t, kWordLanes> numbers;
#pragma unroll
  for (int i = 0; i < kWordLanes; ++i) {
    numbers.lane[i] = to_number<format>(static_cast<float>(values.lane[i]) * scale.inverse);
  }
  reinterpret_cast<Vector<uint8_t, kWordLanes>*>(block)[lane] = numbers;
  if (lane == 0) {
    *reinterpret_cast<float*>(block + kScaledNumel) = scale.scale;
  }
}

// Each warp encodes kBlocksPerWarp blocks, whose loads are in flight together.
template <ScaledFormat format, typename Src>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(uint8_t* __restrict__ blocks, const Src* __restrict__ src, int64_t num_blocks) {
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int64_t first = warp * kBlocksPerWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto* in = reinterpret_cast<const Vector<Src, kWordLanes>*>(src) + first * kWarp + lane;
  Vector<Src, kWordLanes> values[kBlocksPerWarp] = {};
#pragma unroll
  for (int u = 0; u < kBlocksPerWarp; ++u) {
    if (first + u < num_blocks) {
      values[u] = in[u * kWarp];
    }
  }
#pragma unroll
  for (int u = 0; u < kBlocksPerWarp; ++u) {
    if (first + u < num_blocks) { // the same for all lanes of a warp
      encode_block<format>(blocks + (first + u) * kScaledNbytes, values[u], lane);
    }
  }
}

// Decodes `count` groups of `lanes` numbers, with all threads of the block. `begin` is the first
// number's index within `blocks`.
template <ScaledFormat format, int lanes, typename Dst>
__device__ __forceinline__ void decode_groups(
    Dst* __restrict__ dst,
    const uint8_t* __restrict__ blocks,
    int begin,
    int count) {
  // An integer: bytes of a struct would be unpacked, and waited for, between the loads.
  using Numbers = std::conditional_t<lanes == 1, uint8_t, uint32_t>;
  static_assert(sizeof(Numbers) == lanes);
  constexpr int kStep = kThreads * lanes; // distance of a thread's groups: whole blocks
  static_assert(kStep % kScaledNumel == 0);
  constexpr int kStepNbytes = kStep / kScaledNumel * kScaledNbytes;
  auto* out = reinterpret_cast<Vector<Dst, lanes>*>(dst);
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < count;
       first += kThreads * kWordsInFlight) {
    const int number = begin + first * lanes;
    const uint8_t* block = blocks + number / kScaledNumel * kScaledNbytes;
    const uint8_t* from = block + number % kScaledNumel;
    Numbers numbers[kWordsInFlight];
    float scales[kWordsInFlight];
#pragma unroll
    for (int u = 0; u < kWordsInFlight; ++u) {
      if (first + u * kThreads < count) {
        numbers[u] = *reinterpret_cast<const Numbers*>(from + u * kStepNbytes);
        scales[u] = *reinterpret_cast<const float*>(block + kScaledNumel + u * kStepNbytes);
      }
    }
#pragma unroll
    for (int u = 0; u < kWordsInFlight; ++u) {
      if (first + u * kThreads < count) {
        Vector<Dst, lanes> values;
#pragma unroll
        for (int i = 0; i < lanes; ++i) {
          const auto number = static_cast<uint8_t>(numbers[u] >> (8 * i));
          values.lane[i] = scaled<Dst>(of_number<format>(number), scales[u]);
        }
        out[first + u * kThreads] = values;
      }
    }
  }
}

template <ScaledFormat format, typename Dst, typename Table>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const __grid_constant__ Table table, const uint8_t* blocks) {
  const BlockWork work = block_work(table);
  const int64_t past = static_cast<const uint8_t*>(work.src) - blocks;
  const int64_t first =
      past / kScaledNbytes * kScaledNumel + past % kScaledNbytes + work.span.begin;
  const uint8_t* near = blocks + first / kScaledNumel * kScaledNbytes;
  const auto begin = static_cast<int>(first % kScaledNumel);
  auto* dst = static_cast<Dst*>(work.dst) + work.span.begin;
  const int numel = static_cast<int>(work.span.end - work.span.begin);
  const bool aligned = begin % kWordLanes == 0 &&
      reinterpret_cast<uintptr_t>(dst) % alignof(Vector<Dst, kWordLanes>) == 0;
  const int num_words = aligned ? numel / kWordLanes : 0;
  const int past_words = num_words * kWordLanes;
  decode_groups<format, kWordLanes>(dst, near, begin, num_words);
  decode_groups<format, 1>(dst + past_words, near, begin + past_words, numel - past_words);
}

} // namespace

void encode(const EncodeCall& call) {
  const c10::cuda::CUDAGuard guard(call.device);
  const auto stream = c10::cuda::getCurrentCUDAStream(call.device.index());
  constexpr int64_t per_block = kThreads / kWarp * kBlocksPerWarp;
  const int64_t num_blocks = (call.num_blocks + per_block - 1) / per_block;
  TORCH_CHECK_VALUE(num_blocks <= kMaxChunks, "encode: a tensor is too large for one launch");
  visit_scaled(call.element, call.format, [&]<typename Src, ScaledFormat format>() {
    auto* blocks = static_cast<uint8_t*>(call.blocks);
    const auto* src = static_cast<const Src*>(call.src);
    encode_kernel<format, Src><<<num_blocks, kThreads, 0, stream>>>(blocks, src, call.num_blocks);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void decode(const DecodeCall& call) {
  const c10::cuda::CUDAGuard guard(call.device);
  const auto stream = c10::cuda::getCurrentCUDAStream(call.device.index());
  const auto* blocks = static_cast<const uint8_t*>(call.blocks);
  visit_scaled(call.element, call.format, [&]<typename Dst, ScaledFormat format>() {
    launch_runs(call.segments, [&]<typename Table>(const Table& table, unsigned num_blocks, int) {
      decode_kernel<format, Dst, Table><<<num_blocks, kThreads, 0, stream>>>(table, blocks);
    });
  });
}

} // namespace zerocore::kernels::cuda
