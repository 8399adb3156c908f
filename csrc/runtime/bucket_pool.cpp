// The flat-bucket allocator.
#include "runtime/bucket_pool.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace zerocore {

BucketPool::BucketPool(const Streams& streams) : streams_(streams) {}

BucketPool::~BucketPool() {
  // The device's allocator hands the memory to later work of the compute stream. A device that has
  // failed refuses to wait, and nothing is going to run on it.
  try {
    for (const auto& [nbytes, slots] : free_) {
      for (const Slot& slot : slots) {
        streams_.wait(StreamRole::Compute, slot.last_use);
      }
    }
  } catch (const std::exception& error) {
    TORCH_WARN("zerocore: the device failed while the bucket pool was freed: ", error.what());
  }
}

Slot BucketPool::acquire(int64_t nbytes, StreamRole role) {
  Slot slot;
  if (nbytes == 0) {
    return slot;
  }
  std::vector<Slot>& free = free_[nbytes];
  if (free.empty()) {
    const c10::DeviceGuard guard(streams_.device());
    slot.data = c10::GetAllocator(streams_.device().type())->allocate(nbytes);
    slot.nbytes = nbytes;
    stats_.reserved_nbytes += nbytes;
    ++stats_.num_allocations;
    // Work that the compute stream was given may still use the memory's last owner.
    streams_.note_allocation(slot.data.get(), nbytes);
    streams_.order(role, StreamRole::Compute);
  } else {
    slot = std::move(free.back());
    free.pop_back();
    streams_.wait(role, slot.last_use);
    slot.last_use = nullptr;
  }
  stats_.in_use_nbytes += nbytes;
  stats_.peak_nbytes = std::max(stats_.peak_nbytes, stats_.in_use_nbytes);
  stats_.recent_peak_nbytes = std::max(stats_.recent_peak_nbytes, stats_.in_use_nbytes);
  return slot;
}

void BucketPool::release(Slot& slot, StreamRole role) {
  if (!slot.held()) {
    return;
  }
  slot.last_use = streams_.record(role);
  stats_.in_use_nbytes -= slot.nbytes;
  free_[slot.nbytes].push_back(std::exchange(slot, Slot{}));
}

} // namespace zerocore
