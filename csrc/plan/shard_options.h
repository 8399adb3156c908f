// Options of a sharded model that decide what it communicates and holds: of its engine and its
// plan.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/layout.h"

namespace zerocore {

// Which memory holds a part of the training state: the device's, the host's or a file's.
//
// Note [States on the host]
// Trained parameters have main weights on the host, also where layers compute in the same type.
// They are what the optimizer sees and updates there, beside its moments. The device keeps the
// weights that layers compute with, and gets them anew after each update. Parameters that do not
// require grad when the model is sharded have no states and stay as they are. A state on disk is
// memory of the host whose bytes are a file's, see Note [Memory of a file].

enum class Tier : uint8_t { Device, Host, Disk };

struct Tiers {
  Tier states = Tier::Device; // main weights, and what optimizers keep for them
  Tier gradients = Tier::Device; // between steps
  Tier parameters = Tier::Device; // shards of what layers compute with

  // On the host or on disk.
  bool has_host_states() const {
    return states != Tier::Device;
  }
  bool has_host_parameters() const {
    return parameters != Tier::Device;
  }
  bool uses_disk() const {
    return states == Tier::Disk || parameters == Tier::Disk;
  }
  // They are kept there, or sent there for the update.
  bool has_host_gradients() const {
    return gradients != Tier::Device || has_host_states();
  }
  // Gradients are kept there, and come off a device unless the CPU computes, `on_host`.
  bool lands_gradients(bool on_host) const {
    return gradients == Tier::Host && !on_host;
  }
  // The device gets weights anew after an update.
  bool returns_weights() const {
    return has_host_states() && !has_host_parameters();
  }
  // Regions that are trained.
  static std::vector<int> trained_regions(const Layout& layout) {
    return layout.regions_where(
        [](const Region& region) { return region.is_gathered && region.requires_grad; });
  }
  // Regions that have main weights.
  std::vector<int> main_regions(const Layout& layout) const {
    return layout.regions_where([this](const Region& region) {
      return region.is_kept && (region.has_main() || (returns_weights() && region.requires_grad));
    });
  }
  // Regions whose gradients are sent to memory of their own on the host.
  std::vector<int> landing_regions(const Layout& layout) const {
    const bool lands = has_host_states() && gradients == Tier::Device;
    return lands ? trained_regions(layout) : std::vector<int>();
  }
  // Regions whose weights the host keeps in the type that layers compute in as well, to be sent.
  std::vector<int> sent_regions(const Layout& layout) const {
    return layout.regions_where([this](const Region& region) {
      return returns_weights() && region.is_kept && region.has_main();
    });
  }
};

// Each is read where it acts; what lies between hands the struct on.
struct ShardOptions {
  int64_t stage = 3; // see UnitMesh
  int prefetch = 1; // units gathered ahead
  int reductions = 1; // units reduced at a time, where reductions hold blocks of the pool
  bool hold_full = false; // stages 2, 3: full sums of gradients are kept while not syncing
  bool by_rows = false; // a shard is some rows of each parameter, see plan/layout.h
  bool shard_across = false; // the optimizer's states are sharded over the replicas, too
  bool sums_in_order = false; // of gradients, see Note [Sums in order]
  bool retain_last = true; // the unit that a forward leaves last stays for its backward
  Tiers tiers;
};

} // namespace zerocore
