// The bucket allocator: one arena of device memory, which parameters and gradients use in turn.
//
// PoolMap decides the place of a block, see Note [Places in the arena]. Events order the users of
// its bytes: release() records the end of the last use, and acquire() makes the next user's stream
// wait for the uses of these bytes, and for no others. A step like the previous one allocates
// nothing. Not thread-safe: calls come from one thread at a time.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "device/stream.h"
#include "memory/registered_memory.h"
#include "plan/pool_map.h"

namespace zerocore {

// Memory of the device's allocator. Once freed, later work of `stream` may get it.
struct DeviceMemory {
  c10::DataPtr data;
  int64_t nbytes = 0;
  std::optional<c10::Stream> stream;
};

// A block of device memory that its holder owns until release().
struct Slot {
  BlockKey key;
  void* data = nullptr;
  int64_t nbytes = 0;
  DeviceMemory own; // the memory, if it lies outside the arena

  bool held() const {
    return nbytes > 0;
  }
};

class BucketPool {
 public:
  explicit BucketPool(const Streams& streams) : streams_(streams) {}
  ~BucketPool();

  // Returns a slot of exactly `nbytes` for work of `role`'s stream, or an empty slot for 0 bytes.
  // If the device's allocator throws, the pool is unchanged.
  Slot acquire(const BlockKey& key, int64_t nbytes, StreamRole role);
  // Frees a slot. Its last use is the role's work so far; the caller has ordered that work after
  // uses on other streams. Does nothing for an empty slot.
  void release(Slot& slot, StreamRole role = StreamRole::Compute);

  // Sets the places of the expected blocks, before the first slot is acquired.
  void expect(PoolMap map) {
    map_ = std::move(map);
  }
  // Makes each new arena a window of `memory`, which outlives the pool.
  void register_arena(RegisteredMemory& memory) {
    registered_ = &memory;
  }
  // While set, new slots lie outside the arena: they serve no regular step.
  void set_apart(bool apart) {
    apart_ = apart;
  }

  // Frees the arena if no slot is held; a later acquire() allocates a new one.
  void free_unused() {
    if (map_.stats().in_use_nbytes == 0) {
      free_arena();
    }
  }
  // While set, slots outside the arena reuse memory of released slots of the same size. This has an
  // effect only on the CPU, where the system maps and clears new memory; a device's allocator has
  // its own cache.
  void set_recycling(bool recycling) {
    recycles_ = recycling && !streams_.has_streams();
    spares_.clear();
  }
  void forget_recent_peak() {
    map_.forget_recent_peak();
  }
  const PoolStats& stats() const {
    return map_.stats();
  }

 private:
  struct PastUse {
    Range range; // bytes of the arena
    StreamEvent end;
  };

  DeviceMemory take_spare(int64_t nbytes);
  c10::DataPtr new_spare(int64_t nbytes) const;
  DeviceMemory own(c10::DataPtr data, int64_t nbytes) const;
  void free(DeviceMemory& memory) const;
  void take_memory(Slot& slot, const std::optional<int64_t>& offset, StreamRole role);
  void wait_for_past_uses(const Range& range, StreamRole role);
  void free_arena();

  const Streams& streams_;
  RegisteredMemory* registered_ = nullptr; // null for the device's allocator
  PoolMap map_;
  DeviceMemory arena_;
  int64_t arrangement_ = 0; // the arrangement of map_ that the arena has
  std::vector<PastUse> past_uses_; // disjoint ranges, oldest first
  bool apart_ = false;
  bool recycles_ = false;
  std::vector<DeviceMemory> spares_;
};

} // namespace zerocore
