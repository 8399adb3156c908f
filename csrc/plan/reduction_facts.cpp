// Bytes of what a reduction holds and sends.
#include "plan/reduction_facts.h"

namespace zerocore {

int64_t ReductionFacts::nbytes_at(RegionKey key, GradPlace place) const {
  const Region& region = region_of(key);
  switch (place) {
    case GradPlace::Kept:
      return region.grad.itemsize *
          (options_.policy.shards_gradients() ? region.shard_numel : region.numel());
    case GradPlace::Full:
      return region.grad.itemsize * region.numel();
    case GradPlace::Wire:
      return region.reduce.itemsize * region.numel();
    case GradPlace::Scratch:
      return options_.method.received_nbytes(result_nbytes(key), options_.world_size);
  }
  return 0;
}

int64_t ReductionFacts::sent_nbytes(RegionKey key, GradPlace place) const {
  const int64_t nbytes = nbytes_at(key, place);
  return options_.policy.shards_optimizer() ? options_.method.wire_nbytes(nbytes) : nbytes;
}

} // namespace zerocore
