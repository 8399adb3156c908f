// `F.linear` whose backward writes the weight's gradient where a reduction takes it from.
//
// Autograd steals a gradient that nobody else refers to, so the tensor that the backward returns
// becomes the leaf's gradient as it is. All that autograd promises holds: uses of the weight that
// add up, hooks, and gradients of gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

namespace zerocore {

// Where the gradient of the weight is to lie, contiguous and of its shape; undefined for anywhere.
// Called in a backward that records nothing, right before it is written.
using GradPlace = std::function<at::Tensor()>;

// As torch.nn.functional.linear, in values and gradients to the last bit.
at::Tensor fused_linear(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    GradPlace place);

} // namespace zerocore
