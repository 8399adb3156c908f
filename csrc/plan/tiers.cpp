// Which memory holds a part of the training state.
#include "plan/tiers.h"

namespace zerocore {

std::vector<int> Tiers::main_regions(const Layout& layout) const {
  std::vector<int> indices = layout.kept_regions();
  std::erase_if(indices, [&](int index) {
    const Region& region = layout.regions()[index];
    return !region.has_main() && !(returns_weights() && region.requires_grad);
  });
  return indices;
}

std::vector<int> Tiers::sent_regions(const Layout& layout) const {
  return returns_weights() ? layout.main_regions() : std::vector<int>();
}

std::vector<int> Tiers::trained_regions(const Layout& layout) {
  std::vector<int> indices = layout.gathered_regions();
  std::erase_if(indices, [&](int index) { return !layout.regions()[index].requires_grad; });
  return indices;
}

std::vector<int> Tiers::landing_regions(const Layout& layout) const {
  const bool lands = has_host_states() && gradients == Tier::Device;
  return lands ? trained_regions(layout) : std::vector<int>();
}

} // namespace zerocore
