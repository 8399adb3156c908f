// The parts of a unit's training state, and the bytes of each that a rank has in some memory;
// integers only.
#pragma once

#include <array>
#include <cstdint>

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
PartSizes part_sizes(Tier tier, const Layout& layout, const Tiers& tiers, const UnitMesh& mesh);

} // namespace zerocore
