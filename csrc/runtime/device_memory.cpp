// Memory as tensors have it.
#include "runtime/device_memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace zerocore {

c10::DataPtr allocate_memory(c10::Device device, int64_t nbytes) {
  const c10::DeviceGuard guard(device);
  if (device.is_cpu()) {
    return c10::GetAllocator(device.type())->allocate(static_cast<size_t>(nbytes));
  }
  // The GPU allocator that c10 knows is the one from before any was plugged in. Modes of Python
  // (that make fake tensors) have no say in it.
  const c10::impl::ExcludeDispatchKeyGuard below_modes(c10::python_ks);
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  return at::empty({nbytes}, options).storage().set_data_ptr(c10::DataPtr(nullptr, device));
}

} // namespace zerocore
