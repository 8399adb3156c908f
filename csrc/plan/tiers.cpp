// Which memory holds a part of the training state.
#include "plan/tiers.h"

namespace zerocore {

std::vector<int> Tiers::main_regions(const Layout& layout) const {
  return layout.regions_where([this](const Region& region) {
    return region.is_kept && (region.has_main() || (returns_weights() && region.requires_grad));
  });
}

std::vector<int> Tiers::sent_regions(const Layout& layout) const {
  return layout.regions_where([this](const Region& region) {
    return returns_weights() && region.is_kept && region.has_main();
  });
}

std::vector<int> Tiers::trained_regions(const Layout& layout) {
  return layout.regions_where(
      [](const Region& region) { return region.is_gathered && region.requires_grad; });
}

std::vector<int> Tiers::landing_regions(const Layout& layout) const {
  const bool lands = has_host_states() && gradients == Tier::Device;
  return lands ? trained_regions(layout) : std::vector<int>();
}

} // namespace zerocore
