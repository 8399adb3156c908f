// The flat-bucket allocator: an arena of device memory that units and gradients use in turn.
//
// PoolMap decides where a block lies, see Note [Places in the arena]. Events order the users of its
// bytes: release() records when the last use ends. acquire() makes the next user's stream wait for
// the uses of its bytes, and for no others. A step like the one before allocates nothing. Not
// thread-safe: calls come from one thread at a time.
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

// Memory of the device's allocator. Once freed, it goes to later work of `stream`.
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
  DeviceMemory own; // the memory, if it is not the arena's

  bool held() const {
    return nbytes > 0;
  }
};

class BucketPool {
 public:
  explicit BucketPool(const Streams& streams) : streams_(streams) {}
  ~BucketPool();

  // Returns a slot of exactly `nbytes`, which work of `role`'s stream may use at once; an empty
  // slot for 0 bytes. Throws what the device's allocator throws; the pool is then unchanged.
  Slot acquire(const BlockKey& key, int64_t nbytes, StreamRole role);
  // Gives a slot back. Its last use is the work that the role's stream has so far; the caller has
  // ordered that after uses on other streams. Does nothing for an empty slot.
  void release(Slot& slot, StreamRole role = StreamRole::Compute);

  // Sets the places of the expected blocks; no slot was acquired yet.
  void expect(PoolMap map) {
    map_ = std::move(map);
  }
  // Makes each new arena a window of `memory`, which outlives the pool.
  void register_arena(RegisteredMemory& memory) {
    registered_ = &memory;
  }
  // While set, slots are held for other reasons than a step and lie outside the arena.
  void set_apart(bool apart) {
    apart_ = apart;
  }

  // Gives the arena back to the device's allocator if no slot is held; a later acquire() takes a
  // new one.
  void free_unused() {
    if (map_.stats().in_use_nbytes == 0) {
      free_arena();
    }
  }
  // While set, slots outside the arena reuse memory of released slots of their size. This acts on
  // the CPU only, where the system maps and clears new memory; a device's allocator has its own
  // cache.
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
  int64_t arrangement_ = 0; // of the map that the arena is for
  std::vector<PastUse> past_uses_; // disjoint ranges, oldest first
  bool apart_ = false;
  bool recycles_ = false;
  std::vector<DeviceMemory> spares_;
};

} // namespace zerocore
