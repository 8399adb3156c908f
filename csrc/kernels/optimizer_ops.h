// AdamW on tensors: checks the arguments, then runs the device's loops.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/loops.h"

namespace zerocore::kernels {

// Lists of equal length. Tensor i of each belongs to weight i, with as many elements, dense in the
// same order; a gradient of the weight's shape may have any order. Each list has one dtype.
struct AdamWTensors {
  at::TensorList weights;
  at::TensorList grads; // dtype that casts to the weights' dtype
  at::TensorList exp_avgs; // of the weights' dtype
  at::TensorList exp_avg_sqs; // of the weights' dtype
  at::TensorList steps; // one float32 element: steps taken before; run() increments it
  at::TensorList model_weights; // float16 or bfloat16, for float32 weights; may be empty
};

// Tensors of one float32 element, on the weights' device.
struct AdamWScalarTensors {
  std::optional<at::Tensor> lr; // instead of AdamWOptions::lr
  std::optional<at::Tensor> grad_scale; // factor of the gradients
  std::optional<at::Tensor> found_inf; // unless zero, the step changes nothing
};

// One step of AdamW. The constructor checks the arguments and increments the weights' versions.
// Another thread may call run(); the tensors' memory must live until then. It reads and writes
// weights, moments, steps and model weights once. On CUDA it is two launches on the current stream
// for up to about 500 tensors, the first one for the steps; the host does not wait for the device.
// See Note [The arithmetic of torch].
class AdamWUpdate {
 public:
  // Throws c10::ValueError or c10::TypeError for wrong arguments.
  AdamWUpdate(
      const AdamWTensors& tensors,
      const AdamWOptions& options,
      const AdamWScalarTensors& scalars);

  void run() const;

 private:
  std::vector<at::Tensor> grads_; // copies of gradients whose order is not the weight's
  at::Tensor first_; // weight
  AdamWTypes types_{};
  AdamWList list_;
  AdamWOptions options_;
  AdamWScalars numbers_;
};

} // namespace zerocore::kernels
