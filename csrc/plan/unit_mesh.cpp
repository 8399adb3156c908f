#include "plan/unit_mesh.h"

#include <c10/util/Exception.h>

namespace zerocore {

UnitMesh UnitMesh::of(
    const ShardOptions& sharding,
    Axis state,
    Axis replicas,
    bool on_host,
    Axis near) {
  replicas.name = AxisName::Replicas;
  near.name = AxisName::Near;
  TORCH_CHECK_VALUE(
      sharding.stage >= 0 && sharding.stage <= 3,
      "stage must be 0, 1, 2 or 3, got ",
      sharding.stage);
  const bool shares = state.size > 1;
  UnitMesh mesh;
  mesh.state = shares ? state : replicas;
  mesh.replicas = shares ? replicas : state;
  mesh.divisor = mesh.world_size();
  mesh.shards_optimizer = shares && sharding.stage >= 1;
  mesh.shards_gradients = shares && sharding.stage >= 2;
  mesh.shards_parameters = shares && sharding.stage == 3;
  mesh.sums_in_order = sharding.sums_in_order ||
      (!mesh.shards_optimizer && !mesh.sums_across() && mesh.state.methods.sums_in_parts);
  if (mesh.shards_parameters && near.size < state.size) {
    mesh.near = near;
  }
  if (sharding.shard_across && mesh.shards_optimizer && mesh.sums_across()) {
    mesh.shards_across = true;
    mesh.near = mesh.shards_parameters ? mesh.state : near;
  }
  if (sharding.tiers.has_host_parameters()) {
    mesh.shards_parameters = true;
  }
  if (sharding.tiers.lands_gradients(on_host)) {
    mesh.shards_gradients = true;
  }
  return mesh;
}

} // namespace zerocore
