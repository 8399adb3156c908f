// Tensors of the device as the CPU's kernels see them.
#pragma once

#include <ATen/core/Tensor.h>

namespace async_device {

// A tensor of the CPU over the memory of a tensor of the device, for a task: it keeps nothing
// alive.
at::Tensor on_cpu(const at::Tensor& tensor);

} // namespace async_device
