// Parameters of a unit as they come from the wire, until they are copied to where layers want them.
//
// See Note [Shards of rows] in plan/layout.h.
#pragma once

#include <string>

#include "runtime/bucket.h"
#include "runtime/bucket_pool.h"

namespace zerocore {

class Staging {
 public:
  // The layout outlives it. `shard` is this rank's. Takes no memory.
  Staging(UnitId unit, const Layout& layout, int64_t shard, c10::Device device, std::string name);

  // Takes a block of the pool for gathers to write to, and gives it back.
  void take(BucketPool& pool);
  void give_back(BucketPool& pool);
  // What gathers write to, rank after rank.
  const Bucket& bucket() const {
    return bucket_;
  }
  // Orders, on the compute stream: `to` gets what was gathered, parameter after parameter.
  void copy_out(const Bucket& to, const Streams& streams, const std::string& unit) const;

 private:
  UnitId unit_;
  const Layout& layout_;
  Bucket bucket_;
  Slot slot_;
};

} // namespace zerocore
