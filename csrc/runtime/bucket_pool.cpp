// The flat-bucket allocator.
#include "runtime/bucket_pool.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "common/math.h"

namespace zerocore {

BucketPool::BucketPool(const Streams& streams) : streams_(streams) {}

BucketPool::~BucketPool() {
  // A device that has failed refuses to wait, and nothing is going to run on it.
  try {
    free_arena();
  } catch (const std::exception& error) {
    TORCH_WARN("zerocore: the device failed while the bucket pool was freed: ", error.what());
  }
}

Slot BucketPool::acquire(const BlockKey& key, int64_t nbytes, StreamRole role) {
  Slot slot;
  if (nbytes == 0) {
    return slot;
  }
  slot.key = key;
  slot.nbytes = nbytes;
  const std::optional<int64_t> offset = map_.acquire(key, nbytes, /*learn=*/!apart_);
  try {
    take_memory(slot, offset, role);
  } catch (...) {
    if (arena_.get() == nullptr) {
      map_.drop_arena();
    }
    map_.release(key);
    throw;
  }
  return slot;
}

void BucketPool::take_memory(Slot& slot, std::optional<int64_t> offset, StreamRole role) {
  if (!offset) {
    slot.own = allocate(slot.nbytes);
    slot.data = slot.own.get();
    streams_.order(role, StreamRole::Compute);
    return;
  }
  if (arena_.get() == nullptr) {
    arena_ = allocate(map_.arena_nbytes());
    past_uses_ = {{{0, map_.arena_nbytes()}, streams_.record(StreamRole::Compute)}};
  }
  slot.data = static_cast<char*>(arena_.get()) + *offset;
  wait_for_past_uses({*offset, *offset + slot.nbytes}, role);
}

void BucketPool::release(Slot& slot, StreamRole role) {
  if (!slot.held()) {
    return;
  }
  if (slot.own.get() != nullptr) {
    streams_.order(StreamRole::Compute, role);
  } else if (streams_.has_streams()) {
    const int64_t begin = static_cast<char*>(slot.data) - static_cast<char*>(arena_.get());
    past_uses_.push_back({{begin, begin + slot.nbytes}, streams_.record(role)});
  }
  map_.release(std::exchange(slot, Slot{}).key);
  if (map_.arrangement() != arrangement_) {
    arrangement_ = map_.arrangement();
    free_arena();
  }
}

// Work that the compute stream was given may still use the memory's last owner.
c10::DataPtr BucketPool::allocate(int64_t nbytes) const {
  const c10::DeviceGuard guard(streams_.device());
  c10::DataPtr memory = c10::GetAllocator(streams_.device().type())->allocate(nbytes);
  streams_.note_allocation(memory.get(), nbytes);
  return memory;
}

// The newest first: it is behind most others, and a wait that would order nothing new is left out.
void BucketPool::wait_for_past_uses(const Range& range, StreamRole role) {
  if (!streams_.has_streams()) {
    return;
  }
  std::vector<PastUse> rest;
  for (auto use = past_uses_.rbegin(); use != past_uses_.rend(); ++use) {
    if (!intersect(use->range, range).empty()) {
      streams_.wait(role, use->end);
    }
  }
  for (PastUse& use : past_uses_) {
    for (const Range& left :
         {Range{use.range.begin, std::min(use.range.end, range.begin)},
          Range{std::max(use.range.begin, range.end), use.range.end}}) {
      if (!left.empty()) {
        rest.push_back({left, use.end});
      }
    }
  }
  past_uses_ = std::move(rest);
}

// The device's allocator hands the memory to later work of the compute stream.
void BucketPool::free_arena() {
  for (auto use = past_uses_.rbegin(); use != past_uses_.rend(); ++use) {
    streams_.wait(StreamRole::Compute, use->end);
  }
  past_uses_.clear();
  arena_.clear();
}

} // namespace zerocore
