// Numbers of one byte with a scale for each block, on a GPU.
//
// A warp makes one block of numbers, four by each lane. Every access is aligned to what it moves:
// blocks of 132 bytes follow each other, so words of four bytes are the widest.
#include "kernels/scaled.h"

#include <c10/cuda/CUDAGuard.h>

#include "kernels/cuda/loops.h"
#include "kernels/cuda/table.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/scaling.h"

namespace zerocore::kernels::cuda {

namespace {

constexpr int kWordLanes = 4; // numbers in a word
constexpr int kWords = 8; // that a thread loads before it stores the first of them
static_assert(kWarp * kWordLanes == kScaledNumel);

__device__ __forceinline__ uint32_t largest_of_warp(uint32_t value) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const uint32_t other = __shfl_xor_sync(~0u, value, lanes);
    value = other > value ? other : value;
  }
  return value;
}

template <ScaledFormat format, typename Src>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(uint8_t* blocks, const Src* src, int64_t num_blocks) {
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (index >= num_blocks) { // for a whole warp alike
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto* in = reinterpret_cast<const Vector<Src, kWordLanes>*>(src + index * kScaledNumel);
  const Vector<Src, kWordLanes> values = in[lane];
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
  uint8_t* block = blocks + index * kScaledNbytes;
  reinterpret_cast<Vector<uint8_t, kWordLanes>*>(block)[lane] = numbers;
  if (lane == 0) {
    *reinterpret_cast<float*>(block + kScaledNumel) = scale.scale;
  }
}

__device__ __forceinline__ float scale_at(const uint8_t* blocks, int64_t element) {
  const uint8_t* block = blocks + element / kScaledNumel * kScaledNbytes;
  return *reinterpret_cast<const float*>(block + kScaledNumel);
}

// Decodes a thread's words from `begin` on, kThreads apart; `first` is the element of word 0.
template <ScaledFormat format, typename Dst>
__device__ __forceinline__ void decode_words(
    Dst* dst,
    const uint8_t* blocks,
    int64_t first,
    int begin,
    int num_words) {
  using Word = Vector<uint8_t, kWordLanes>;
  using Values = Vector<Dst, kWordLanes>;
  Word words[kWords];
  float scales[kWords];
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    const int word = begin + u * kThreads;
    if (word < num_words) {
      const int64_t element = first + word * kWordLanes;
      words[u] = *reinterpret_cast<const Word*>(blocks + scaled_place(element));
      scales[u] = scale_at(blocks, element);
    }
  }
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    const int word = begin + u * kThreads;
    if (word < num_words) {
      Values values;
#pragma unroll
      for (int i = 0; i < kWordLanes; ++i) {
        values.lane[i] = scaled<Dst>(of_number<format>(words[u].lane[i]), scales[u]);
      }
      reinterpret_cast<Values*>(dst)[word] = values;
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
  auto* dst = static_cast<Dst*>(work.dst) + work.span.begin;
  const int numel = static_cast<int>(work.span.end - work.span.begin);
  const bool aligned = first % kWordLanes == 0 &&
      reinterpret_cast<uintptr_t>(dst) % alignof(Vector<Dst, kWordLanes>) == 0;
  const int num_words = aligned ? numel / kWordLanes : 0;
  for (int word = static_cast<int>(threadIdx.x); word < num_words; word += kThreads * kWords) {
    decode_words<format>(dst, blocks, first, word, num_words);
  }
  for (int i = num_words * kWordLanes + static_cast<int>(threadIdx.x); i < numel; i += kThreads) {
    const uint8_t number = blocks[scaled_place(first + i)];
    dst[i] = scaled<Dst>(of_number<format>(number), scale_at(blocks, first + i));
  }
}

} // namespace

void encode(const EncodeCall& call) {
  const c10::cuda::CUDAGuard guard(call.device);
  const auto stream = c10::cuda::getCurrentCUDAStream(call.device.index());
  const int64_t num_blocks = (call.num_blocks * kWarp + kThreads - 1) / kThreads;
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
