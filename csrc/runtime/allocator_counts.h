// Reads how often torch's allocator has turned to a device, as it counts in this process.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace zerocore {

struct AllocatorCounts {
  int64_t num_retries = 0; // memory was short, so its cache was freed and it tried again
  int64_t num_device_allocations = 0; // calls to the device's own allocator, such as cudaMalloc
};

// Nothing where nobody counts: on the CPU, and where another allocator was plugged into torch.
std::optional<AllocatorCounts> allocator_counts(c10::Device device);

} // namespace zerocore
