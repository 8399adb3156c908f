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

// Parameters are what layers compute with, main weights what is updated, and Sent these as they are
// sent to the device. The moments are those of AdamW. Gradients are kept, or sent for the update.
enum class StatePart : uint8_t { Parameters, Main, Sent, ExpAvg, ExpAvgSq, Gradients };
inline constexpr int kNumStateParts = 6;

// By StatePart.
using PartSizes = std::array<int64_t, kNumStateParts>;

// Sizes of the parts of a unit that the mesh's rank has on the host or on disk.
inline PartSizes part_sizes(
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
