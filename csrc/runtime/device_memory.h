// Bytes from a device's allocator.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace zerocore {

// At least `nbytes`, not initialised. From the allocator that tensors come from at this moment: a
// CUDA program may have plugged in another one.
c10::DataPtr allocate_memory(c10::Device device, int64_t nbytes);

} // namespace zerocore
