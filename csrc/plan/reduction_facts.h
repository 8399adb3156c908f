// Facts of a reduction of gradients: the rank that sums, the bytes that are sent, the sizes of
// blocks; integers only.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "common/types.h"
#include "plan/layout.h"
#include "plan/shard_options.h"
#include "plan/stage_policy.h"
#include "plan/wire_methods.h"

namespace zerocore {

// Memory for the gradients of a region.
enum class GradPlace : uint8_t {
  Kept, // this rank's gradients between steps
  Full, // packed gradients of all ranks' shards; unless gradients are sharded, Kept is a part of it
  Wire, // the same in the type that they travel in
  Scratch, // the result of a reduction, where it is not the gradient yet
};
inline constexpr int kNumGradPlaces = 4;

struct ReductionOptions {
  ShardOptions sharding;
  StagePolicy policy; // of the stage, or of 0 where there is nothing to shard
  int64_t world_size = 1; // ranks that share the state
  int64_t num_replicas = 1;
  ReduceMethod method; // of reduce-scatters
  bool on_host = false; // collectives run on no stream: the host waits for them
  int64_t shard = 0; // this rank's
  bool counts_kept = true; // among the ranks that hold a gradient, this is the one that adds it
};

using RegionKey = std::pair<UnitId, int>; // unit and region

class ReductionFacts {
 public:
  // The units' layouts outlive it.
  ReductionFacts(const ReductionOptions& options, std::vector<const Layout*> layouts)
      : options_(options), layouts_(std::move(layouts)) {}

  const ReductionOptions& options() const {
    return options_;
  }
  const std::vector<const Layout*>& layouts() const {
    return layouts_;
  }
  const Region& region_of(RegionKey key) const {
    return layouts_[key.first]->regions()[key.second];
  }
  bool communicates() const {
    return options_.world_size * options_.num_replicas > 1;
  }
  bool sums_across() const {
    return options_.world_size > 1 && options_.num_replicas > 1;
  }
  // See Note [Gradients on the host].
  bool lands() const {
    return options_.sharding.tiers.lands_gradients(options_.on_host);
  }
  bool is_wired(RegionKey key) const {
    return communicates() && region_of(key).has_wire();
  }
  // That the collective leaves for each element.
  int64_t parts() const {
    return options_.policy.shards_optimizer() ? options_.method.parts(options_.world_size) : 1;
  }
  // Of a place; of a bucket as the collective sends it; of this rank's part of a sum.
  int64_t nbytes_at(RegionKey key, GradPlace place) const;
  int64_t sent_nbytes(RegionKey key, GradPlace place) const;
  int64_t result_nbytes(RegionKey key) const {
    return region_of(key).reduce.itemsize * region_of(key).shard_numel;
  }

 private:
  ReductionOptions options_;
  std::vector<const Layout*> layouts_;
};

} // namespace zerocore
