// The parts of a unit's training state, and the bytes of each that a rank has in some memory;
// integers only.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plan/layout.h"
#include "plan/tiers.h"
#include "plan/unit_mesh.h"

namespace zerocore {

// In the order in which they lie on the host or on disk.
inline constexpr std::array kStateParts =
    {Memory::Shard, Memory::Main, Memory::Sent, Memory::ExpAvg, Memory::ExpAvgSq, Memory::Kept};

// Bytes of the parts of a unit that the mesh's rank has on the host or on disk. Gradients are kept,
// or sent for the update.
inline ByMemory<int64_t> part_sizes(
    Tier tier,
    const Layout& layout,
    const Tiers& tiers,
    const UnitMesh& mesh) {
  const Layout own = layout.of_shard(mesh.shard());
  const Layout main = own.retyped(&Region::main);
  const std::vector<int> trained = Tiers::trained_regions(layout);
  const bool has_states = tiers.states == tier;
  const bool has_parameters = tiers.parameters == tier && mesh.shards_parameters;
  const bool has_gradients = tier == Tier::Host && tiers.has_host_gradients();
  ByMemory<int64_t> sizes;
  sizes[Memory::Shard] = has_parameters ? own.nbytes() : 0;
  sizes[Memory::Main] = has_states ? main.nbytes_of(tiers.main_regions(layout)) : 0;
  sizes[Memory::Sent] = has_states ? own.nbytes_of(tiers.sent_regions(layout)) : 0;
  sizes[Memory::ExpAvg] = sizes[Memory::ExpAvgSq] = has_states ? main.nbytes_of(trained) : 0;
  sizes[Memory::Kept] = has_gradients ? own.retyped(&Region::grad).nbytes_of(trained) : 0;
  return sizes;
}

} // namespace zerocore
