// Options that determine the communication and the memory of a sharded model, for the engine and
// the planner.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/layout.h"

namespace zerocore {

// Note [States on the host]
// Trained parameters have main weights on the host, even if layers compute in the same dtype. The
// optimizer updates them there, next to its moments. The device has the model weights, which the
// host sends after each update. Parameters that do not require grad when the model is sharded have
// no states and do not change. A state on disk is host memory mapped from a file, see Note [Memory
// of a file].

// The memory of a part of the training state.
enum class Tier : uint8_t { Device, Host, Disk };

struct Tiers {
  Tier states = Tier::Device; // main weights and the optimizer's states
  Tier gradients = Tier::Device; // between steps
  Tier parameters = Tier::Device; // shards of model weights

  // Return whether main weights, or shards of parameters, are on the host or on disk.
  bool has_host_states() const {
    return states != Tier::Device;
  }
  bool has_host_parameters() const {
    return parameters != Tier::Device;
  }
  bool uses_disk() const {
    return states == Tier::Disk || parameters == Tier::Disk;
  }
  // Returns whether gradients are kept on the host, or sent there for the update.
  bool has_host_gradients() const {
    return gradients != Tier::Device || has_host_states();
  }
  // Returns whether a device's gradients are copied to the host and kept there. `on_host`: the CPU
  // computes, so there is nothing to copy.
  bool lands_gradients(bool on_host) const {
    return gradients == Tier::Host && !on_host;
  }
  // Returns whether the host sends weights to the device after an update.
  bool returns_weights() const {
    return has_host_states() && !has_host_parameters();
  }
  // Returns the gathered regions that require grad.
  static std::vector<int> trained_regions(const Layout& layout) {
    return layout.regions_where(
        [](const Region& region) { return region.is_gathered && region.requires_grad; });
  }
  // Returns the regions that have main weights.
  std::vector<int> main_regions(const Layout& layout) const {
    return layout.regions_where([this](const Region& region) {
      return region.is_kept && (region.has_main() || (returns_weights() && region.requires_grad));
    });
  }
  // Returns the regions whose gradients are kept on the device and copied to the host.
  std::vector<int> landing_regions(const Layout& layout) const {
    const bool lands = has_host_states() && gradients == Tier::Device;
    return lands ? trained_regions(layout) : std::vector<int>();
  }
  // Returns the regions whose main weights the host casts to the layers' dtype, to send them.
  std::vector<int> sent_regions(const Layout& layout) const {
    return layout.regions_where([this](const Region& region) {
      return returns_weights() && region.is_kept && region.has_main();
    });
  }
};

struct ShardOptions {
  int64_t stage = 3; // see UnitMesh
  int prefetch = 1; // units gathered ahead of their use
  int reductions = 1; // units reduced at a time, if reductions hold blocks of the pool
  bool hold_full = false; // stages 2, 3: keeps full local sums of gradients without sync
  bool by_rows = false; // see Note [Shards of rows]
  bool shard_across = false; // see Note [Sharded across]
  bool sums_in_order = false; // see Note [Sums in order]
  bool retain_last = true; // the last unit of a forward stays unsharded for its backward
  Tiers tiers;
};

} // namespace zerocore
