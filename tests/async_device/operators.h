// Tensors of the device as the CPU's kernels see them.
#pragma once

#include <ATen/core/Tensor.h>

namespace async_device {

// Returns a CPU tensor over the memory of a device's tensor, for a task: it keeps nothing alive.
at::Tensor on_cpu(const at::Tensor& tensor);

} // namespace async_device
