// Makes the stream of a block's next user wait for the last uses of its bytes.
#include "memory/bucket_pool.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>

#include "common/math.h"
#include "memory/bucket.h"
#include "memory/host_memory.h"

namespace zerocore {

BucketPool::~BucketPool() {
  // A failed device refuses the wait; it will run no more work.
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
  const std::optional<int64_t> offset = map_.find_place(key, nbytes, /*learn=*/!apart_);
  take_memory(slot, offset, role);
  map_.acquire(key, nbytes, offset, /*learn=*/!apart_);
  return slot;
}

void BucketPool::take_memory(Slot& slot, const std::optional<int64_t>& offset, StreamRole role) {
  if (!offset) {
    slot.own = take_spare(slot.nbytes);
    slot.data = slot.own.data.get();
    streams_.order(role, StreamRole::Compute);
    return;
  }
  if (arena_.nbytes == 0) {
    const int64_t nbytes = map_.arena_nbytes();
    arena_ =
        own(registered_ == nullptr ? allocate_memory(streams_.device(), nbytes)
                                   : registered_->allocate(Window::Arena, nbytes),
            nbytes);
    past_uses_ = {{{0, arena_.nbytes}, streams_.record(StreamRole::Compute)}};
  }
  TORCH_INTERNAL_ASSERT(arena_.nbytes == map_.arena_nbytes());
  slot.data = static_cast<char*>(arena_.data.get()) + *offset;
  wait_for_past_uses({*offset, *offset + slot.nbytes}, role);
}

void BucketPool::release(Slot& slot, StreamRole role) {
  if (!slot.held()) {
    return;
  }
  if (slot.own.nbytes > 0) {
    streams_.order(StreamRole::Compute, role);
    if (recycles_) {
      spares_.push_back(std::move(slot.own));
    } else {
      free(slot.own);
    }
  } else if (streams_.has_streams()) {
    const int64_t begin = static_cast<char*>(slot.data) - static_cast<char*>(arena_.data.get());
    past_uses_.push_back({{begin, begin + slot.nbytes}, streams_.record(role)});
  }
  map_.release(std::exchange(slot, Slot{}).key);
  if (std::exchange(arrangement_, map_.arrangement()) != map_.arrangement()) {
    free_arena();
  }
}

// Frees spares of other sizes before it allocates. So the pool never has more slots than were held
// at a time.
DeviceMemory BucketPool::take_spare(int64_t nbytes) {
  const auto found = std::ranges::find(spares_, nbytes, &DeviceMemory::nbytes);
  if (found == spares_.end()) {
    spares_.clear();
    return own(new_spare(nbytes), nbytes);
  }
  DeviceMemory memory = std::move(*found);
  spares_.erase(found);
  return memory;
}

// The system clears new pages, which takes as long as the copy into them. Huge pages take less.
c10::DataPtr BucketPool::new_spare(int64_t nbytes) const {
  constexpr int64_t kHugeNbytes = int64_t{4} << 20;
  return recycles_ && nbytes >= kHugeNbytes
      ? HostMemory::map({.nbytes = nbytes, .inherited = true})->at(0)
      : allocate_memory(streams_.device(), nbytes);
}

// The compute stream may still run work of the memory's last user.
DeviceMemory BucketPool::own(c10::DataPtr data, int64_t nbytes) const {
  DeviceMemory memory{std::move(data), nbytes, streams_.compute_stream()};
  streams_.note_allocator(memory.data.get(), nbytes);
  return memory;
}

// The compute stream already runs after the work that used the memory.
void BucketPool::free(DeviceMemory& memory) const {
  streams_.order_other(memory.stream);
  streams_.note_allocator(memory.data.get(), memory.nbytes);
  memory = {};
}

void BucketPool::wait_for_past_uses(const Range& range, StreamRole role) {
  const auto overlaps = [&](const PastUse& use) { return !intersect(use.range, range).empty(); };
  if (std::none_of(past_uses_.begin(), past_uses_.end(), overlaps)) {
    return;
  }
  std::vector<PastUse> rest;
  for (const PastUse& use : past_uses_) {
    const Range before{use.range.begin, std::min(use.range.end, range.begin)};
    const Range after{std::max(use.range.begin, range.end), use.range.end};
    for (const Range& left : {before, after}) {
      if (!left.empty()) {
        rest.push_back({left, use.end});
      }
    }
  }
  // Newest first: its clock covers most others, and Streams skips a wait that orders nothing new.
  for (auto use = past_uses_.rbegin(); use != past_uses_.rend(); ++use) {
    if (overlaps(*use)) {
      streams_.wait(role, use->end);
    }
  }
  past_uses_ = std::move(rest);
}

void BucketPool::free_arena() {
  // Most uses end on the compute stream, which needs no wait unless the user has switched streams.
  for (auto use = past_uses_.rbegin(); use != past_uses_.rend(); ++use) {
    streams_.wait(StreamRole::Compute, use->end);
  }
  past_uses_.clear();
  if (arena_.nbytes > 0) {
    free(arena_);
  }
}

} // namespace zerocore
