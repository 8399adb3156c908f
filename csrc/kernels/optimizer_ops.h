// Typed callers of the optimizers' kernels: check the arguments, then run the device's loops.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/loops.h"

namespace zerocore::kernels {

// Lists of equal length; tensor i of each belongs to weight i and has as many elements, dense and
// in the same order (a gradient of the weight's shape in any). Within a list there is one dtype.
struct AdamWTensors {
  at::TensorList weights;
  at::TensorList grads; // of a dtype that casts to the weights'
  at::TensorList exp_avgs; // of the weights' dtype
  at::TensorList exp_avg_sqs; // the same
  at::TensorList steps; // float32 of one element: steps taken before; counted up
  at::TensorList model_weights; // float16 or bfloat16 beside float32 weights; or an empty list
};

// float32 of one element, on the weights' device.
struct AdamWScalarTensors {
  std::optional<at::Tensor> lr; // instead of AdamWOptions::lr
  std::optional<at::Tensor> grad_scale; // gradients are multiplied by it
  std::optional<at::Tensor> found_inf; // not zero: nothing is changed
};

// One step of AdamW whose arguments are checked, and whose weights' versions are counted up
// already. run() may be called by another thread; the tensors' memory must live until then. It is
// one pass: weights, moments, steps and model weights are written. On CUDA two launches (the steps
// are a small one of their own) on the current stream for up to about 500 tensors; nothing waits
// for the device. See Note [The arithmetic of torch].
class AdamWUpdate {
 public:
  // Throws c10::ValueError or c10::TypeError for wrong arguments.
  AdamWUpdate(
      const AdamWTensors& tensors,
      const AdamWOptions& options,
      const AdamWScalarTensors& scalars);

  void run() const;

 private:
  std::vector<at::Tensor> grads_; // copied where their elements lay in another order
  at::Tensor first_; // weight
  AdamWTypes types_{};
  AdamWList list_;
  AdamWOptions options_;
  AdamWScalars numbers_;
};

} // namespace zerocore::kernels
