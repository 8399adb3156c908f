// AdamW's arithmetic for one element, and its factors. No torch header.
//
// Note [The arithmetic of torch]
// Algorithm 2 of "Decoupled Weight Decay Regularization" (Loshchilov and Hutter, 2019), with the
// order of operations of torch.optim.AdamW(fused=True) on the CPU, so float32 gives the same bits.
// The gradient's moving average is a lerp that rounds once, like the sum of the squares. Every
// other operation rounds, so the extension is compiled with -ffp-contract=off. There is one
// difference. Torch handles the last numel % 16 elements of a tensor (% 8 with AVX2) in a scalar
// loop, where its compiler rounds the other product in the sum of the squares. Those elements may
// differ in the last bit of exp_avg_sq, and their weights by as much. Here all elements use the
// same arithmetic, so the result does not depend on the cut into shards.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/scaling.h"

namespace zerocore::kernels {

struct AdamWOptions {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  bool maximize = false;
};

// Numbers on the tensors' device, so that the host does not wait for them; null if absent.
struct AdamWScalars {
  const float* lr = nullptr; // instead of AdamWOptions::lr
  const float* grad_scale = nullptr; // factor of the gradients
  const float* found_inf = nullptr; // unless zero, the step changes nothing
};

// One parameter's tensors; all have their elements in the same order.
struct AdamWSegment {
  void* weight = nullptr;
  const void* grad = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* model_weight = nullptr; // receives the cast weight; null without a model weight
  float* step = nullptr; // steps taken before this one
  int64_t numel = 0;
  int64_t first_chunk = 0; // see Note [Chunks]
};

// Depend on a tensor's step: 1 - beta1^step, and the square root of 1 - beta2^step.
struct BiasCorrection {
  double first = 1;
  double second_sqrt = 1;
};

ZEROCORE_HOST_DEVICE BiasCorrection bias_correction(const AdamWOptions& options, double step) {
  return {1 - std::pow(options.beta1, step), std::sqrt(1 - std::pow(options.beta2, step))};
}

// One tensor's factors, rounded once to A, the type of the computation.
template <typename A>
struct AdamWFactors {
  A grad_factor; // scale and direction
  A decay;
  A lerp_coefficient; // factor of the difference between gradient and average
  bool lerp_from_grad; // the lerp starts at the nearer end: the gradient or the average
  A beta2;
  A square_coefficient;
  A second_sqrt;
  A eps;
  A negative_step_size;
};

template <typename A>
ZEROCORE_HOST_DEVICE AdamWFactors<A> adamw_factors(
    const AdamWOptions& options,
    const AdamWScalars& scalars,
    const BiasCorrection& correction) {
  const double lr = scalars.lr != nullptr ? static_cast<double>(*scalars.lr) : options.lr;
  const A scale = scalars.grad_scale != nullptr ? static_cast<A>(*scalars.grad_scale) : A(1);
  const A weight = static_cast<A>(1 - options.beta1);
  const bool from_grad = !(weight < A(0.5));
  return {
      options.maximize ? -scale : scale,
      static_cast<A>(1 - lr * options.weight_decay),
      from_grad ? weight - A(1) : weight,
      from_grad,
      static_cast<A>(options.beta2),
      static_cast<A>(1 - options.beta2),
      static_cast<A>(correction.second_sqrt),
      static_cast<A>(options.eps),
      static_cast<A>(-(lr / correction.first))};
}

// One element's weight and moments.
template <typename A>
struct AdamWElement {
  A weight;
  A exp_avg;
  A exp_avg_sq;
};

template <typename A>
ZEROCORE_HOST_DEVICE AdamWElement<A> adamw_element(
    AdamWElement<A> old,
    A raw_grad,
    const AdamWFactors<A>& factors) {
  const A grad = raw_grad * factors.grad_factor;
  const A base = factors.lerp_from_grad ? grad : old.exp_avg;
  const A exp_avg = std::fma(factors.lerp_coefficient, grad - old.exp_avg, base);
  const A exp_avg_sq =
      std::fma(factors.square_coefficient * grad, grad, old.exp_avg_sq * factors.beta2);
  const A denominator = std::sqrt(exp_avg_sq) / factors.second_sqrt + factors.eps;
  const A update = factors.negative_step_size * exp_avg / denominator;
  return {old.weight * factors.decay + update, exp_avg, exp_avg_sq};
}

} // namespace zerocore::kernels
