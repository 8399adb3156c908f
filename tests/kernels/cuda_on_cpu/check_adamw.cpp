// Steps of AdamW beside the published algorithm in double precision: "Decoupled Weight Decay
// Regularization" (Loshchilov and Hutter, 2019), algorithm 2.
#include <cmath>

#include "buffers.h"
#include "kernels/cuda/loops.h"

namespace checks {

namespace {

using zerocore::kernels::AdamWList;
using zerocore::kernels::BiasCorrection;
namespace kernels = zerocore::kernels;

constexpr kernels::AdamWOptions kOptions{1e-2, 0.9, 0.999, 1e-8, 0.01, false};
constexpr float kLr = 3e-3F; // on the device, instead of that in the options
constexpr float kGradScale = 0.5F;

struct Element {
  double weight;
  double exp_avg;
  double exp_avg_sq;
};

Element expected(Element old, double grad, double step) {
  grad *= kGradScale;
  const double exp_avg = kOptions.beta1 * old.exp_avg + (1 - kOptions.beta1) * grad;
  const double exp_avg_sq = kOptions.beta2 * old.exp_avg_sq + (1 - kOptions.beta2) * grad * grad;
  const double first = exp_avg / (1 - std::pow(kOptions.beta1, step));
  const double second = exp_avg_sq / (1 - std::pow(kOptions.beta2, step));
  const double decayed = old.weight * (1 - kLr * kOptions.weight_decay);
  return {decayed - kLr * first / (std::sqrt(second) + kOptions.eps), exp_avg, exp_avg_sq};
}

template <typename T>
bool is_close(T value, double wanted) {
  const double digits = sizeof(T) == 2 ? std::is_same_v<T, c10::Half> ? 1e-3 : 8e-3 : 1e-5;
  return std::abs(static_cast<double>(value) - wanted) <= 1e-6 + digits * std::abs(wanted);
}

template <typename Weight, typename Grad, typename Model>
struct Tensor {
  Tensor(int numel, int past, bool same_past)
      : weight(numel, past),
        grad(numel, same_past ? past : some_past()),
        exp_avg(numel, same_past ? past : some_past()),
        exp_avg_sq(numel, same_past ? past : some_past()),
        model(numel, same_past ? past : some_past()),
        steps(pick(0, 2)),
        old_steps(steps) {
    for (int i = 0; i < numel; ++i) {
      exp_avg_sq[i] = static_cast<Weight>(std::abs(static_cast<float>(exp_avg_sq[i])));
      old.push_back(element(i));
    }
  }

  Element element(int64_t i) {
    return {double(weight[i]), double(exp_avg[i]), double(exp_avg_sq[i])};
  }

  bool is_updated() {
    bool right = true;
    for (int64_t i = 0; i < weight.numel(); ++i) {
      const Element wanted = expected(old[i], double(grad[i]), old_steps + 1);
      right = right && is_close(weight[i], wanted.weight) && is_close(exp_avg[i], wanted.exp_avg) &&
          is_close(exp_avg_sq[i], wanted.exp_avg_sq);
    }
    return right && steps == old_steps + 1;
  }

  bool is_unchanged() {
    bool right = true;
    for (int64_t i = 0; i < weight.numel(); ++i) {
      const Element now = element(i);
      right = right && same_bits(&now, &old[i], sizeof(now));
    }
    return right && steps == old_steps;
  }

  bool has_model_weights() {
    bool right = true;
    for (int64_t i = 0; i < weight.numel(); ++i) {
      right = right && is_close(model[i], static_cast<double>(weight[i]));
    }
    return right;
  }

  bool is_intact() const {
    return weight.intact() && grad.intact() && exp_avg.intact() && exp_avg_sq.intact() &&
        model.intact();
  }

  Buffer<Weight> weight;
  Buffer<Grad> grad;
  Buffer<Weight> exp_avg;
  Buffer<Weight> exp_avg_sq;
  Buffer<Model> model;
  float steps;
  float old_steps;
  std::vector<Element> old;
};

template <typename Weight, typename Grad, typename Model>
void check_step(int count, bool overflow) {
  constexpr bool kCasts = !std::is_same_v<Model, Weight>;
  const float found_inf = overflow ? 1.0F : 0.0F;
  std::vector<std::unique_ptr<Tensor<Weight, Grad, Model>>> tensors;
  AdamWList list;
  for (int i = 0; i < count; ++i) {
    const int numel = i % 7 == 6 ? 0 : some_numel(i);
    tensors.push_back(
        std::make_unique<Tensor<Weight, Grad, Model>>(numel, some_past(), pick(0, 1) == 0));
    auto& tensor = *tensors.back();
    list.push(
        {tensor.weight.data(),
         tensor.grad.data(),
         tensor.exp_avg.data(),
         tensor.exp_avg_sq.data(),
         kCasts ? tensor.model.data() : nullptr,
         &tensor.steps,
         numel});
  }
  std::vector<BiasCorrection> corrections(count + 1, BiasCorrection{-9, -9});
  const c10::Device device(c10::DeviceType::CPU);
  const kernels::AdamWTypes types{element_of<Weight>(), element_of<Grad>(), element_of<Model>()};
  const kernels::AdamWScalars scalars{&kLr, &kGradScale, &found_inf};
  kernels::cuda::adamw({device, types, list, kOptions, scalars, corrections.data()});
  expect(corrections.back().first == -9, "AdamW: wrote outside", count, count);
  for (int i = 0; i < count; ++i) {
    auto& tensor = *tensors[i];
    const long numel = tensor.weight.numel();
    expect(
        overflow ? tensor.is_unchanged() : tensor.is_updated(), "AdamW: another value", i, numel);
    expect(overflow || !kCasts || tensor.has_model_weights(), "AdamW: model weight", i, numel);
    expect(tensor.is_intact(), "AdamW: wrote outside", i, numel);
  }
}

template <typename Weight, typename Grad, typename Model>
void check_types() {
  for (const int count : {1, 13, 129}) {
    check_step<Weight, Grad, Model>(count, /*overflow=*/false);
    check_step<Weight, Grad, Model>(count, /*overflow=*/true);
  }
}

} // namespace

void check_adamw() {
  using Half = c10::Half;
  using BFloat16 = c10::BFloat16;
  check_types<float, float, float>();
  check_types<float, float, BFloat16>();
  check_types<float, BFloat16, BFloat16>();
  check_types<float, BFloat16, float>();
  check_types<float, Half, Half>();
  check_types<float, float, Half>();
  check_types<BFloat16, BFloat16, BFloat16>();
  check_types<BFloat16, float, BFloat16>();
  check_types<Half, Half, Half>();
  check_types<Half, float, Half>();
  check_types<double, double, double>();
  check_step<float, float, BFloat16>(600, /*overflow=*/false); // more than one table
}

} // namespace checks
