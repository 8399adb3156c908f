// A ZeRO stage as three placements; the only place that knows the number.
#pragma once

#include <cstdint>

#include "plan/shard_options.h"

namespace zerocore {

enum class Placement { Replicated, Sharded };

struct StagePolicy {
  Placement parameters = Placement::Replicated;
  Placement gradients = Placement::Replicated;
  Placement optimizer = Placement::Replicated;

  // Stage 0-3 on `world_size` ranks; one rank has nothing to shard, whatever the stage.
  // Throws c10::ValueError for any other stage.
  static StagePolicy from_stage(int64_t stage, int64_t world_size);
  // The same, where parameters on the host are gathered from there, also by one rank, and gradients
  // that a device keeps on the host pass through a block. `on_host`: the CPU computes.
  static StagePolicy of(const ShardOptions& sharding, int64_t world_size, bool on_host);

  bool shards_parameters() const {
    return parameters == Placement::Sharded;
  }
  bool shards_gradients() const {
    return gradients == Placement::Sharded;
  }
  bool shards_optimizer() const {
    return optimizer == Placement::Sharded;
  }
  // Whether an optimizer's step begins the first gather of the forward that comes next.
  bool gathers_at_step(const ShardOptions& sharding) const {
    return sharding.gather_at_step && shards_parameters() && shards_optimizer();
  }
};

} // namespace zerocore
