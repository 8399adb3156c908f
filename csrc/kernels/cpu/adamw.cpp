// Runs steps of AdamW on the CPU.
#include "kernels/adamw.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vectors.h"

namespace zerocore::kernels::cpu {

namespace {

constexpr int64_t kChunksPerTask = 4;

// Elements of a half type that are widened at a time, to stay in the first-level cache. Casts are
// separate loops, because compilers do not vectorise them within the update.
constexpr int64_t kBlock = 1024;

template <typename Dst, typename Src>
ZEROCORE_CPU_CLONES void convert(Dst* __restrict dst, const Src* __restrict src, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    dst[i] = static_cast<Dst>(src[i]);
  }
}

template <typename A>
ZEROCORE_CPU_CLONES void update(
    A* __restrict weight,
    const A* __restrict grad,
    A* __restrict exp_avg,
    A* __restrict exp_avg_sq,
    int64_t numel,
    const AdamWFactors<A> factors) {
  for (int64_t i = 0; i < numel; ++i) {
    const auto updated = adamw_element({weight[i], exp_avg[i], exp_avg_sq[i]}, grad[i], factors);
    weight[i] = updated.weight;
    exp_avg[i] = updated.exp_avg;
    exp_avg_sq[i] = updated.exp_avg_sq;
  }
}

// A block's values in the computation's type A: the tensor's own memory, or a copy.
template <typename A, typename T>
class Block {
 public:
  Block(T* data, int64_t numel) : data_(data), numel_(numel) {
    convert(values_, data, numel);
  }
  A* values() {
    return values_;
  }
  void store() {
    convert(data_, values_, numel_);
  }

 private:
  T* data_;
  int64_t numel_;
  std::remove_const_t<A> values_[kBlock];
};
template <typename A>
class Block<A, A> {
 public:
  Block(A* data, int64_t /*numel*/) : data_(data) {}
  A* values() {
    return data_;
  }
  void store() {}

 private:
  A* data_;
};

// Updates elements [begin, begin + numel) of a tensor; numel is at most a block.
template <typename Weight, typename Grad, typename Model>
void update_block(
    const AdamWSegment& segment,
    int64_t begin,
    int64_t numel,
    const AdamWFactors<AccumulateType<Weight>>& factors) {
  using A = AccumulateType<Weight>;
  Block<A, Weight> weight(static_cast<Weight*>(segment.weight) + begin, numel);
  Block<A, Weight> exp_avg(static_cast<Weight*>(segment.exp_avg) + begin, numel);
  Block<A, Weight> exp_avg_sq(static_cast<Weight*>(segment.exp_avg_sq) + begin, numel);
  Block<const A, const Grad> grad(static_cast<const Grad*>(segment.grad) + begin, numel);
  update(weight.values(), grad.values(), exp_avg.values(), exp_avg_sq.values(), numel, factors);
  weight.store();
  exp_avg.store();
  exp_avg_sq.store();
  if constexpr (!std::is_same_v<Model, Weight>) {
    convert(static_cast<Model*>(segment.model_weight) + begin, weight.values(), numel);
  }
}

template <typename Weight, typename Grad, typename Model>
void update_chunk(const AdamWCall& call, int index, Range span) {
  using A = AccumulateType<Weight>;
  const auto factors = adamw_factors<A>(call.options, call.scalars, call.corrections[index]);
  for (int64_t begin = span.begin; begin < span.end; begin += kBlock) {
    const int64_t numel = std::min(kBlock, span.end - begin);
    update_block<Weight, Grad, Model>(call.tensors[index], begin, numel, factors);
  }
}

// Increments the steps. Most tensors have the same step, so neighbours share one correction.
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
    for_each_chunk(call.tensors, kChunksPerTask, [&](int64_t /*chunk*/, int index, Range span) {
      update_chunk<typename T::Weight, typename T::Grad, typename T::Model>(call, index, span);
    });
  });
}

} // namespace zerocore::kernels::cpu
