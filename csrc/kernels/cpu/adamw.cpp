// Steps of AdamW on the CPU.
#include "kernels/adamw.h"

#include <ATen/Parallel.h>

#include <type_traits>

#include "kernels/cpu/clones.h"
#include "kernels/cpu/loops.h"

namespace zerocore::kernels::cpu {

namespace {

constexpr int64_t kChunksPerTask = 4; // enough work to be worth another thread

// `model` is null where Model is Weight.
template <typename Weight, typename Grad, typename Model>
ZEROCORE_CPU_CLONES void update_run(
    Weight* __restrict weight,
    const Grad* __restrict grad,
    Weight* __restrict exp_avg,
    Weight* __restrict exp_avg_sq,
    [[maybe_unused]] Model* __restrict model,
    int64_t numel,
    const AdamWFactors<AccumulateType<Weight>> factors) {
  using A = AccumulateType<Weight>;
  for (int64_t i = 0; i < numel; ++i) {
    const AdamWElement<A> old{
        static_cast<A>(weight[i]), static_cast<A>(exp_avg[i]), static_cast<A>(exp_avg_sq[i])};
    const auto updated = adamw_element(old, static_cast<A>(grad[i]), factors);
    weight[i] = static_cast<Weight>(updated.weight);
    exp_avg[i] = static_cast<Weight>(updated.exp_avg);
    exp_avg_sq[i] = static_cast<Weight>(updated.exp_avg_sq);
    if constexpr (!std::is_same_v<Model, Weight>) {
      model[i] = static_cast<Model>(updated.weight);
    }
  }
}

template <typename Weight, typename Grad, typename Model>
void update_chunk(const AdamWCall& call, int64_t chunk) {
  using A = AccumulateType<Weight>;
  const AdamWList& list = call.tensors;
  const auto first_chunk = [&](int i) { return list[i].first_chunk; };
  const int index = find_segment(first_chunk, list.size(), chunk);
  const AdamWSegment& segment = list[index];
  const Span span = chunk_span(segment.numel, chunk - segment.first_chunk);
  Model* model = nullptr;
  if constexpr (!std::is_same_v<Model, Weight>) {
    model = static_cast<Model*>(segment.model_weight) + span.begin;
  }
  update_run(
      static_cast<Weight*>(segment.weight) + span.begin,
      static_cast<const Grad*>(segment.grad) + span.begin,
      static_cast<Weight*>(segment.exp_avg) + span.begin,
      static_cast<Weight*>(segment.exp_avg_sq) + span.begin,
      model,
      span.end - span.begin,
      adamw_factors<A>(call.options, call.scalars, call.corrections[index]));
}

// Counts the steps; what depends on them is the same for most tensors, and computed once for those.
void advance_steps(const AdamWCall& call) {
  float last = 0;
  BiasCorrection correction;
  for (int i = 0; i < call.tensors.size(); ++i) {
    const float step = ++*call.tensors[i].step;
    if (step != last) {
      correction = bias_correction(call.options, static_cast<double>(step));
      last = step;
    }
    call.corrections[i] = correction;
  }
}

} // namespace

void adamw(const AdamWCall& call) {
  if (call.scalars.found_inf != nullptr && *call.scalars.found_inf != 0) {
    return;
  }
  advance_steps(call);
  visit(call.types, [&](auto types) {
    using T = decltype(types);
    at::parallel_for(0, call.tensors.num_chunks(), kChunksPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        update_chunk<typename T::Weight, typename T::Grad, typename T::Model>(call, chunk);
      }
    });
  });
}

} // namespace zerocore::kernels::cpu
