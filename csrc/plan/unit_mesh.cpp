// The table of stages.
#include "plan/unit_mesh.h"

#include <c10/util/Exception.h>

#include <array>

namespace zerocore {

namespace {

// parameters, gradients, optimizer
using Row = std::array<Placement, 3>;

const Row& row_of(int64_t stage) {
  constexpr Placement R = Placement::Replicated;
  constexpr Placement S = Placement::Sharded;
  static constexpr std::array<Row, 4> kStages = {{
      {R, R, R},
      {R, R, S},
      {R, S, S},
      {S, S, S},
  }};
  TORCH_CHECK_VALUE(
      stage >= 0 && stage < static_cast<int64_t>(kStages.size()),
      "stage must be 0, 1, 2 or 3, got ",
      stage);
  return kStages[stage];
}

} // namespace

UnitMesh UnitMesh::of(
    const ShardOptions& sharding,
    Axis state,
    Axis replicas,
    bool on_host,
    Axis near) {
  replicas.name = AxisName::Replicas;
  near.name = AxisName::Near;
  const Row row = row_of(sharding.stage);
  const bool shares = state.size > 1;
  UnitMesh mesh;
  mesh.state = shares ? state : replicas;
  mesh.replicas = shares ? replicas : state;
  mesh.divisor = mesh.world_size();
  if (shares) {
    mesh.parameters = row[0];
    mesh.gradients = row[1];
    mesh.optimizer = row[2];
  }
  mesh.sums_in_order = sharding.sums_in_order ||
      (!mesh.shards_optimizer() && !mesh.sums_across() && mesh.state.methods.sums_in_parts);
  if (mesh.shards_parameters() && near.size < state.size) {
    mesh.near = near;
  }
  if (sharding.shard_across && mesh.shards_optimizer() && mesh.sums_across()) {
    mesh.across = Placement::Sharded;
    mesh.near = mesh.shards_parameters() ? mesh.state : near;
  }
  if (sharding.tiers.has_host_parameters()) {
    mesh.parameters = Placement::Sharded;
  }
  if (sharding.tiers.lands_gradients(on_host)) {
    mesh.gradients = Placement::Sharded;
  }
  return mesh;
}

} // namespace zerocore
