// The flat-bucket allocator: slots of device memory that units and gradients take turns in.
//
// A slot is handed over by an event: release() says when its last use ends, acquire() makes the
// next user's stream wait for that. Slots are kept by exact size and never go back to the device's
// allocator while the pool lives, so a step that repeats allocates nothing.
// Not thread-safe: calls come from one thread at a time.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "runtime/stream.h"

namespace zerocore {

struct PoolStats {
  int64_t in_use_nbytes = 0;
  int64_t peak_nbytes = 0; // highest in_use_nbytes so far
  int64_t recent_peak_nbytes = 0; // the same since forget_recent_peak()
  int64_t reserved_nbytes = 0; // taken from the device's allocator
  int64_t num_allocations = 0; // calls to the device's allocator
};

// A block of device memory that belongs to whoever holds it, until released.
struct Slot {
  c10::DataPtr data;
  int64_t nbytes = 0;
  StreamEvent last_use;

  bool held() const {
    return nbytes > 0;
  }
};

class BucketPool {
 public:
  explicit BucketPool(const Streams& streams);
  ~BucketPool();
  BucketPool(const BucketPool&) = delete;
  BucketPool& operator=(const BucketPool&) = delete;

  // A slot of exactly `nbytes`; work of `role`'s stream may use it at once. Zero bytes give an
  // empty slot. Throws what the device's allocator throws.
  Slot acquire(int64_t nbytes, StreamRole role);
  // Gives a slot back; what the stream of `role` was given so far is its last use.
  // Releasing an empty slot does nothing.
  void release(Slot& slot, StreamRole role);

  void forget_recent_peak() {
    stats_.recent_peak_nbytes = stats_.in_use_nbytes;
  }
  const PoolStats& stats() const {
    return stats_;
  }

 private:
  const Streams& streams_;
  std::unordered_map<int64_t, std::vector<Slot>> free_; // by nbytes
  PoolStats stats_;
};

} // namespace zerocore
