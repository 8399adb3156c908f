// Bytes of the parts of a unit's training state.
#include "plan/state_parts.h"

namespace zerocore {

PartSizes part_sizes(Tier tier, const Layout& layout, const Tiers& tiers, const UnitMesh& mesh) {
  const Layout own = layout.of_shard(mesh.shard());
  const Layout main = own.retyped(&Region::main);
  const std::vector<int> trained = Tiers::trained_regions(layout);
  const bool has_states = tiers.states == tier;
  const bool has_parameters = tiers.parameters == tier && mesh.shards_parameters;
  const bool has_gradients = tier == Tier::Host && tiers.has_host_gradients();
  const int64_t moment = has_states ? main.nbytes_of(trained) : 0;
  return {
      has_parameters ? own.nbytes() : 0,
      has_states ? main.nbytes_of(tiers.main_regions(layout)) : 0,
      has_states ? own.nbytes_of(tiers.sent_regions(layout)) : 0,
      moment,
      moment,
      has_gradients ? own.retyped(&Region::grad).nbytes_of(trained) : 0};
}

} // namespace zerocore
