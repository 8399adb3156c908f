// Reads the statistics of torch's caching allocator.
#include "runtime/allocator_counts.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

namespace zerocore {

std::optional<AllocatorCounts> allocator_counts(c10::Device device) {
  if (device.is_cpu()) {
    return std::nullopt;
  }
  try {
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    return AllocatorCounts{stats.num_alloc_retries, stats.num_device_alloc};
  } catch (const c10::Error&) {
    return std::nullopt; // a plugged-in one has no statistics, and some devices have none
  }
}

} // namespace zerocore
