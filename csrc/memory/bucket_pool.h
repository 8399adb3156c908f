// The flat-bucket allocator: an arena of device memory that units and gradients take turns in.
//
// Where a block lies is decided by the map, see Note [Places in the arena]. A slot is handed over
// by events: release() says when its last use ends, acquire() makes the next user's stream wait for
// the uses of the bytes that it gets, and of no others. A step that repeats allocates nothing.
// Not thread-safe: calls come from one thread at a time.
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

// Memory of the device's allocator, which hands it to later work of `stream` when it is freed.
struct DeviceMemory {
  c10::DataPtr data;
  int64_t nbytes = 0;
  std::optional<c10::Stream> stream;
};

// A block of device memory that belongs to whoever holds it, until released.
struct Slot {
  BlockKey key;
  void* data = nullptr;
  int64_t nbytes = 0;
  DeviceMemory own; // the memory, where it is not the arena's

  bool held() const {
    return nbytes > 0;
  }
};

class BucketPool {
 public:
  explicit BucketPool(const Streams& streams) : streams_(streams) {}
  ~BucketPool();

  // A slot of exactly `nbytes`; work of `role`'s stream may use it at once. Zero bytes give an
  // empty slot. Throws what the device's allocator throws, and has changed nothing then.
  Slot acquire(const BlockKey& key, int64_t nbytes, StreamRole role);
  // Gives a slot back; what the role's stream was given so far is its last use, which lies behind
  // those of other streams. Releasing an empty slot does nothing.
  void release(Slot& slot, StreamRole role = StreamRole::Compute);

  // Places of the blocks that are expected; nothing was acquired yet.
  void expect(PoolMap map) {
    map_ = std::move(map);
  }
  // From now on a new arena is a window of `memory`, which outlives the pool.
  void register_arena(RegisteredMemory& memory) {
    registered_ = &memory;
  }
  // From now on slots are held for other reasons than a step and keep out of the arena.
  void set_apart(bool apart) {
    apart_ = apart;
  }

  // Gives the arena back to the device's allocator if no slot is held; the next one takes it anew.
  void free_unused() {
    if (map_.stats().in_use_nbytes == 0) {
      free_arena();
    }
  }
  // While it is on, memory of slots apart is used again by slots of the same size, on the CPU:
  // where each new one would be mapped and cleared by the system. A device's allocator does it
  // itself.
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
  int64_t arrangement_ = 0; // of the map, that the arena is for
  std::vector<PastUse> past_uses_; // apart from each other, oldest first
  bool apart_ = false;
  bool recycles_ = false;
  std::vector<DeviceMemory> spares_;
};

} // namespace zerocore
