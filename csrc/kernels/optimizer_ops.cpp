// Converts the tensors of an AdamW step to the list that the loops take.
#include "kernels/optimizer_ops.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "kernels/checks.h"

namespace zerocore::kernels {

namespace {

const char* const kOp = "adamw";

AdamWTypes checked_types(const AdamWTensors& tensors) {
  const auto weight = tensors.weights[0].scalar_type();
  const auto grad = tensors.grads[0].scalar_type();
  const auto model =
      tensors.model_weights.empty() ? weight : tensors.model_weights[0].scalar_type();
  const AdamWTypes types{weight, grad, model};
  TORCH_CHECK_TYPE(
      can_update(types) && (tensors.model_weights.empty() || model != weight),
      kOp,
      ": cannot update ",
      weight,
      " weights from ",
      grad,
      " gradients",
      tensors.model_weights.empty() ? "" : c10::str(" and write ", model, " model weights"),
      ". Weights are float32, float16, bfloat16 or float64; gradients have their dtype, or both "
      "are among float32, float16 and bfloat16; model weights are float16 or bfloat16 beside "
      "float32 weights");
  return types;
}

void check_counts(const AdamWTensors& tensors) {
  const size_t count = tensors.weights.size();
  check_count(kOp, "gradients", tensors.grads.size(), "weights", count);
  check_count(kOp, "exp_avgs", tensors.exp_avgs.size(), "weights", count);
  check_count(kOp, "exp_avg_sqs", tensors.exp_avg_sqs.size(), "weights", count);
  check_count(kOp, "steps", tensors.steps.size(), "weights", count);
  if (!tensors.model_weights.empty()) {
    check_count(kOp, "model weights", tensors.model_weights.size(), "weights", count);
  }
}

// Checks tensor `index` of a list like check_member(); also its size and strides: its weight's.
void check_sized(
    const char* name,
    at::TensorList list,
    size_t index,
    const at::Tensor& weight,
    const at::Tensor& first) {
  check_member(kOp, name, index, list[index], first, list[0].scalar_type());
  TORCH_CHECK_VALUE(
      list[index].numel() == weight.numel(),
      kOp,
      ": ",
      name,
      " ",
      index,
      " has ",
      list[index].numel(),
      " elements, expected the ",
      weight.numel(),
      " of its weight");
  TORCH_CHECK_VALUE(
      weight.dim() < 2 || list[index].sizes() != weight.sizes() ||
          list[index].strides() == weight.strides(),
      kOp,
      ": ",
      name,
      " ",
      index,
      " has strides ",
      list[index].strides(),
      " and its weight ",
      weight.strides(),
      "; an assignment `p.data = t` must keep the strides");
}

const float* scalar(const char* name, const std::optional<at::Tensor>& tensor, c10::Device device) {
  if (!tensor.has_value()) {
    return nullptr;
  }
  TORCH_CHECK_VALUE(
      tensor->numel() == 1 && tensor->scalar_type() == at::kFloat && tensor->device() == device,
      kOp,
      ": ",
      name,
      " must be float32 of one element on ",
      device,
      ", got ",
      tensor->scalar_type(),
      " of ",
      tensor->numel(),
      " on ",
      tensor->device());
  return reinterpret_cast<const float*>(Source(*tensor).data);
}

// Returns the gradients. Copies each one whose elements are not in its weight's order.
std::vector<at::Tensor> in_order(const AdamWTensors& tensors) {
  std::vector<at::Tensor> grads(tensors.grads.begin(), tensors.grads.end());
  for (size_t i = 0; i < grads.size(); ++i) {
    const at::Tensor& weight = tensors.weights[i];
    if (grads[i].sizes() == weight.sizes() && grads[i].strides() != weight.strides()) {
      grads[i] = at::empty_strided(weight.sizes(), weight.strides(), grads[i].options());
      grads[i].copy_(tensors.grads[i]);
    }
  }
  return grads;
}

AdamWSegment make_segment(const AdamWTensors& tensors, size_t index) {
  const at::Tensor& first = tensors.weights[0];
  const at::Tensor& weight = tensors.weights[index];
  check_sized("weight", tensors.weights, index, weight, first);
  check_sized("gradient", tensors.grads, index, weight, first);
  check_sized("exp_avg", tensors.exp_avgs, index, weight, first);
  check_sized("exp_avg_sq", tensors.exp_avg_sqs, index, weight, first);
  const auto step = scalar("a step", tensors.steps[index], first.device());
  void* model = nullptr;
  if (!tensors.model_weights.empty()) {
    check_sized("model weight", tensors.model_weights, index, weight, first);
    model = Memory(tensors.model_weights[index]).data;
  }
  return {
      Memory(weight).data,
      Source(tensors.grads[index]).data,
      Memory(tensors.exp_avgs[index]).data,
      Memory(tensors.exp_avg_sqs[index]).data,
      model,
      const_cast<float*>(step),
      weight.numel()};
}

void check_moments(const AdamWTensors& tensors) {
  for (const at::TensorList moments : {tensors.exp_avgs, tensors.exp_avg_sqs}) {
    TORCH_CHECK_TYPE(
        moments[0].scalar_type() == tensors.weights[0].scalar_type(),
        kOp,
        ": the moments are ",
        moments[0].scalar_type(),
        ", expected ",
        tensors.weights[0].scalar_type(),
        " like the weights");
  }
}

} // namespace

AdamWUpdate::AdamWUpdate(
    const AdamWTensors& given,
    const AdamWOptions& options,
    const AdamWScalarTensors& scalars)
    : options_(options) {
  check_counts(given);
  grads_ = in_order(given);
  AdamWTensors tensors = given;
  tensors.grads = grads_;
  if (tensors.weights.empty()) {
    return;
  }
  first_ = tensors.weights[0];
  types_ = checked_types(tensors);
  check_moments(tensors);
  const auto device = first_.device();
  numbers_ = {
      scalar("lr", scalars.lr, device),
      scalar("grad_scale", scalars.grad_scale, device),
      scalar("found_inf", scalars.found_inf, device)};
  for (size_t i = 0; i < tensors.weights.size(); ++i) {
    list_.push(make_segment(tensors, i));
  }
  for (const at::Tensor& weight : tensors.weights) {
    weight.unsafeGetTensorImpl()->bump_version(); // tells autograd about the write
  }
}

void AdamWUpdate::run() const {
  if (!first_.defined()) {
    return;
  }
  constexpr int64_t numbers_each = sizeof(BiasCorrection) / sizeof(double);
  const at::Tensor corrections =
      at::empty({numbers_each * list_.size()}, first_.options().dtype(at::kDouble));
  auto* room = reinterpret_cast<BiasCorrection*>(Memory(corrections).data);
  loops_of(first_.device()).adamw({first_.device(), types_, list_, options_, numbers_, room});
}

} // namespace zerocore::kernels
