// `F.linear` whose backward writes the weight's gradient where a reduction takes it from.
#include "engine/graph/fused_linear.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <utility>

namespace zerocore {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Place final : torch::CustomClassHolder {
  explicit Place(GradPlace find_) : find(std::move(find_)) {}

  GradPlace find;
};

at::Tensor weight_grad(const at::Tensor& grad, const at::Tensor& rows, AutogradContext& context) {
  at::Tensor to;
  if (!c10::GradMode::is_enabled()) {
    to = static_cast<Place&>(*context.saved_data["place"].toCapsule()).find();
  }
  if (!to.defined()) {
    return grad.t().mm(rows);
  }
  at::mm_out(to, grad.t(), rows);
  return to;
}

// The products are those of torch's own backward, of matrices with the same strides.
struct FusedLinear final : torch::autograd::Function<FusedLinear> {
  static at::Tensor forward(
      AutogradContext* context,
      const at::Tensor& input,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& bias,
      c10::intrusive_ptr<Place> place) {
    context->save_for_backward({input, weight});
    context->saved_data["place"] = c10::IValue::make_capsule(std::move(place));
    context->saved_data["has_bias"] = bias.has_value();
    return at::linear(input, weight, bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& input = saved[0];
    const at::Tensor grad = grads[0].reshape({-1, grads[0].size(-1)});
    variable_list found(4);
    if (context->needs_input_grad(0)) {
      found[0] = grad.mm(saved[1]).view(input.sizes());
    }
    if (context->needs_input_grad(1)) {
      found[1] = weight_grad(grad, input.reshape({-1, input.size(-1)}), *context);
    }
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2)) {
      found[2] = at::sum_to(grad, at::IntArrayRef{grad.size(1)});
    }
    return found;
  }
};

// Whether torch's own formula would be the one above.
bool is_plain(const at::Tensor& input, const at::Tensor& weight) {
  return c10::GradMode::is_enabled() && weight.requires_grad() && input.dim() >= 2 &&
      input.dtype() == weight.dtype() && !at::isTensorSubclassLike(input) &&
      !input._fw_grad(0).defined() && !at::autocast::is_autocast_enabled(input.device().type());
}

} // namespace

at::Tensor fused_linear(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    GradPlace place) {
  if (!is_plain(input, weight)) {
    return at::linear(input, weight, bias);
  }
  return FusedLinear::apply(input, weight, bias, c10::make_intrusive<Place>(std::move(place)));
}

} // namespace zerocore
