// The table of stages.
#include "plan/stage_policy.h"

#include <c10/util/Exception.h>

#include <array>

namespace zerocore {

StagePolicy StagePolicy::from_stage(int64_t stage, int64_t world_size) {
  constexpr Placement R = Placement::Replicated;
  constexpr Placement S = Placement::Sharded;
  constexpr std::array<StagePolicy, 4> kStages = {{
      // parameters, gradients, optimizer
      {R, R, R},
      {R, R, S},
      {R, S, S},
      {S, S, S},
  }};
  TORCH_CHECK_VALUE(
      stage >= 0 && stage < static_cast<int64_t>(kStages.size()),
      "stage must be 0, 1, 2 or 3, got ",
      stage);
  return world_size == 1 ? kStages[0] : kStages[stage];
}

StagePolicy StagePolicy::of(const ShardOptions& sharding, int64_t world_size, bool on_host) {
  StagePolicy policy = from_stage(sharding.stage, world_size);
  if (sharding.tiers.has_host_parameters()) {
    policy.parameters = Placement::Sharded;
  }
  if (sharding.tiers.lands_gradients(on_host)) {
    policy.gradients = Placement::Sharded;
  }
  return policy;
}

} // namespace zerocore
