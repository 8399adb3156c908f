// Runs steps of AdamW on a GPU.
//
// A small first kernel increments the steps and computes the bias corrections, one thread per
// tensor. So the blocks of the second kernel compute no powers, and none reads a step that another
// block has incremented.
#include "kernels/adamw.h"

#include <c10/cuda/CUDAGuard.h>

#include <type_traits>

#include "kernels/cuda/loops.h"
#include "kernels/cuda/table.cuh"
#include "kernels/cuda/vector.cuh"

namespace zerocore::kernels::cuda {

namespace {

constexpr int kFewTensors = 128;
constexpr int kManyTensors = 512;

// Part of a list as a kernel's parameter; see Note [Tables by value].
template <int capacity>
struct AdamWTable : ChunkTable<capacity> {
  void* weight[capacity];
  const void* grad[capacity];
  void* exp_avg[capacity];
  void* exp_avg_sq[capacity];
  void* model_weight[capacity];

  void set(int row, const AdamWSegment& segment) {
    weight[row] = segment.weight;
    grad[row] = segment.grad;
    exp_avg[row] = segment.exp_avg;
    exp_avg_sq[row] = segment.exp_avg_sq;
    model_weight[row] = segment.model_weight;
  }
};
static_assert(sizeof(AdamWTable<kManyTensors>) <= 32764 - 256, "room for other parameters");

template <int capacity>
struct StepTable {
  int num_tensors;
  float* step[capacity];
};

template <int capacity>
__global__ void __launch_bounds__(kThreads) advance_kernel(
    const __grid_constant__ StepTable<capacity> table,
    const AdamWOptions options,
    const float* found_inf,
    BiasCorrection* corrections) {
  const int index = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (index >= table.num_tensors || (found_inf != nullptr && *found_inf != 0)) {
    return;
  }
  const float step = *table.step[index] + 1;
  *table.step[index] = step;
  corrections[index] = bias_correction(options, static_cast<double>(step));
}

// The elements of one block.
template <typename Weight, typename Grad, typename Model>
struct Run {
  Weight* weight;
  const Grad* grad;
  Weight* exp_avg;
  Weight* exp_avg_sq;
  Model* model; // used if it is not Weight
  int numel;
};

template <typename T, int lanes>
__device__ __forceinline__ bool is_aligned(const T* data) {
  return reinterpret_cast<uintptr_t>(data) % alignof(Vector<T, lanes>) == 0;
}

// Like split_vectors(), for addresses that must all be aligned together.
template <int lanes, typename Weight, typename Grad, typename Model>
__device__ __forceinline__ VectorSplit split_run(const Run<Weight, Grad, Model>& run) {
  constexpr int group = static_cast<int>(sizeof(Weight)) * lanes;
  const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(run.weight) % group);
  const int head = past == 0 ? 0 : (group - past) / static_cast<int>(sizeof(Weight));
  bool aligned = is_aligned<Weight, lanes>(run.weight + head) &&
      is_aligned<Grad, lanes>(run.grad + head) && is_aligned<Weight, lanes>(run.exp_avg + head) &&
      is_aligned<Weight, lanes>(run.exp_avg_sq + head);
  if constexpr (!std::is_same_v<Model, Weight>) {
    aligned = aligned && is_aligned<Model, lanes>(run.model + head);
  }
  if (!aligned || run.numel <= head) {
    return {run.numel, 0};
  }
  return {head, (run.numel - head) / lanes};
}

// Updates `count` groups of `lanes` elements from element `begin` on, with all threads of the
// block. The four loads of a group, up to 16 bytes each, are in flight together.
template <int lanes, typename Weight, typename Grad, typename Model>
__device__ __forceinline__ void update_groups(
    const Run<Weight, Grad, Model>& run,
    int begin,
    int count,
    const AdamWFactors<AccumulateType<Weight>>& factors) {
  using A = AccumulateType<Weight>;
  auto* weights = reinterpret_cast<Vector<Weight, lanes>*>(run.weight + begin);
  const auto* grads = reinterpret_cast<const Vector<Grad, lanes>*>(run.grad + begin);
  auto* exp_avgs = reinterpret_cast<Vector<Weight, lanes>*>(run.exp_avg + begin);
  auto* exp_avg_sqs = reinterpret_cast<Vector<Weight, lanes>*>(run.exp_avg_sq + begin);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const Vector<Grad, lanes> grad = grads[i];
    Vector<Weight, lanes> weight = weights[i];
    Vector<Weight, lanes> exp_avg = exp_avgs[i];
    Vector<Weight, lanes> exp_avg_sq = exp_avg_sqs[i];
    [[maybe_unused]] Vector<Model, lanes> model;
#pragma unroll
    for (int lane = 0; lane < lanes; ++lane) {
      const AdamWElement<A> old{
          static_cast<A>(weight.lane[lane]),
          static_cast<A>(exp_avg.lane[lane]),
          static_cast<A>(exp_avg_sq.lane[lane])};
      const auto updated = adamw_element(old, static_cast<A>(grad.lane[lane]), factors);
      weight.lane[lane] = static_cast<Weight>(updated.weight);
      exp_avg.lane[lane] = static_cast<Weight>(updated.exp_avg);
      exp_avg_sq.lane[lane] = static_cast<Weight>(updated.exp_avg_sq);
      if constexpr (!std::is_same_v<Model, Weight>) {
        model.lane[lane] = static_cast<Model>(updated.weight);
      }
    }
    weights[i] = weight;
    exp_avgs[i] = exp_avg;
    exp_avg_sqs[i] = exp_avg_sq;
    if constexpr (!std::is_same_v<Model, Weight>) {
      reinterpret_cast<Vector<Model, lanes>*>(run.model + begin)[i] = model;
    }
  }
}

template <typename Weight, typename Grad, typename Model, int capacity>
__device__ __forceinline__ Run<Weight, Grad, Model> block_run(
    const AdamWTable<capacity>& table,
    int index,
    Range span) {
  return {
      static_cast<Weight*>(table.weight[index]) + span.begin,
      static_cast<const Grad*>(table.grad[index]) + span.begin,
      static_cast<Weight*>(table.exp_avg[index]) + span.begin,
      static_cast<Weight*>(table.exp_avg_sq[index]) + span.begin,
      static_cast<Model*>(table.model_weight[index]) + span.begin,
      static_cast<int>(span.end - span.begin)};
}

// By default ptxas limits the float-only kernel to 40 registers, and spills.
template <typename Weight, typename Grad, typename Model>
constexpr bool kOnlyFloats =
    std::is_same_v<Weight, float> && std::is_same_v<Grad, float> && std::is_same_v<Model, float>;
template <typename Weight, typename Grad, typename Model>
constexpr int kBlocksPerSm = kOnlyFloats<Weight, Grad, Model> ? 5 : 0; // 0: no bound

template <typename Weight, typename Grad, typename Model, int capacity>
__global__ void __launch_bounds__(kThreads, (kBlocksPerSm<Weight, Grad, Model>)) adamw_kernel(
    const __grid_constant__ AdamWTable<capacity> table,
    const AdamWOptions options,
    const AdamWScalars scalars,
    const BiasCorrection* corrections) {
  using A = AccumulateType<Weight>;
  constexpr int lanes = kLanes<Weight, Grad>; // model weights are no wider
  if (scalars.found_inf != nullptr && *scalars.found_inf != 0) {
    return;
  }
  const auto [index, span] = block_chunk(table, kChunkNumel);
  __shared__ AdamWFactors<A> shared;
  if (threadIdx.x == 0) {
    shared = adamw_factors<A>(options, scalars, corrections[index]);
  }
  __syncthreads();
  const AdamWFactors<A> factors = shared;
  const auto run = block_run<Weight, Grad, Model>(table, index, span);
  const VectorSplit split = split_run<lanes>(run);
  const int head = static_cast<int>(split.head);
  const int body = static_cast<int>(split.num_vectors);
  const int past = head + body * lanes;
  update_groups<1>(run, 0, head, factors);
  update_groups<lanes>(run, head, body, factors);
  update_groups<1>(run, past, run.numel - past, factors);
}

template <int capacity, typename Weight, typename Grad, typename Model>
void launch_adamw(const AdamWCall& call) {
  const auto stream = c10::cuda::getCurrentCUDAStream(call.device.index());
  const auto launch = [&](const AdamWTable<capacity>& table, unsigned num_blocks, int begin) {
    BiasCorrection* corrections = call.corrections + begin;
    StepTable<capacity> steps;
    steps.num_tensors = table.num_segments;
    for (int i = 0; i < table.num_segments; ++i) {
      steps.step[i] = call.tensors[begin + i].step;
    }
    const unsigned num_step_blocks = (steps.num_tensors + kThreads - 1) / kThreads;
    advance_kernel<capacity><<<num_step_blocks, kThreads, 0, stream>>>(
        steps, call.options, call.scalars.found_inf, corrections);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if (num_blocks > 0) {
      adamw_kernel<Weight, Grad, Model, capacity>
          <<<num_blocks, kThreads, 0, stream>>>(table, call.options, call.scalars, corrections);
    }
  };
  launch_in_tables<AdamWTable<capacity>>(call.tensors, launch);
}

} // namespace

void adamw(const AdamWCall& call) {
  const c10::cuda::CUDAGuard guard(call.device);
  visit(call.types, [&](auto types) {
    using T = decltype(types);
    if (call.tensors.size() <= kFewTensors) {
      launch_adamw<kFewTensors, typename T::Weight, typename T::Grad, typename T::Model>(call);
    } else {
      launch_adamw<kManyTensors, typename T::Weight, typename T::Grad, typename T::Model>(call);
    }
  });
}

} // namespace zerocore::kernels::cuda
