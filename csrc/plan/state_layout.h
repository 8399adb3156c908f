// Where the parts of units' training state lie on the host and on disk; integers only.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "common/types.h"
#include "plan/layout.h"
#include "plan/shard_options.h"
#include "plan/unit_mesh.h"

namespace zerocore {

// The parts of a unit's state, in their order on the host or on disk.
inline constexpr std::array kStateParts =
    {Memory::Shard, Memory::Main, Memory::Sent, Memory::ExpAvg, Memory::ExpAvgSq, Memory::Kept};

// Returns the bytes of a unit's parts that the mesh's rank has in the tier, Host or Disk. Kept
// counts gradients that the host keeps, or receives for the update.
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

// -- on the host: one mapping ---------------------------------------------------------------------
//
// Memory that a device copies from or to comes first, unit after unit, so that it alone can be
// pinned. Two buffers for gradients of a device follow, see Note [Gradients of a device on the
// host]. The moments come last, on pages of their own; they take memory when an optimizer first
// writes them. Each part has the alignment of a region.

class HostLayout {
 public:
  // `lands`: gradients are copied from a device and kept here.
  HostLayout(const Tiers& tiers, bool lands) : tiers_(tiers), lands_(lands) {}
  // Adds the next unit.
  void add(const Layout& layout, const UnitMesh& mesh);

  // Returns a part's bytes in the mapping; empty without the part on the host. Add all units first.
  Range part(UnitId unit, Memory which) const;
  // Returns the bytes of a trained region's gradient.
  Range gradient(UnitId unit, int region) const;

  // Returns one of the two buffers for gradients that are added to others; empty if there is none.
  Range landing_buffer(int index) const;

  int64_t nbytes() const {
    return moments_begin() + moments_nbytes_;
  }
  // Returns how many bytes at the front a device copies from or to.
  int64_t copied_nbytes() const {
    return landing_buffer(1).end;
  }
  // Return the bytes of weights (main weights, their casts for sending, shards of parameters) and
  // of gradients.
  int64_t weights_nbytes() const {
    return weights_nbytes_;
  }
  int64_t gradients_nbytes() const {
    return gradients_nbytes_;
  }
  // Returns all other bytes without the elements of moments.
  int64_t gaps_nbytes() const {
    return nbytes() - weights_nbytes_ - gradients_nbytes_ - moment_elements_nbytes_;
  }

 private:
  struct HostUnit {
    ByMemory<Range> parts; // offsets of moments count from moments_begin()
    std::vector<Range> gradients; // by region
  };

  int64_t moments_begin() const;
  void add_gradients(const Layout& layout, HostUnit& unit);
  int64_t moment_elements(const Layout& layout, int64_t shard) const;

  Tiers tiers_;
  bool lands_;
  std::vector<HostUnit> units_;
  int64_t parts_nbytes_ = 0, moments_nbytes_ = 0, landing_nbytes_ = 0;
  int64_t weights_nbytes_ = 0, gradients_nbytes_ = 0, moment_elements_nbytes_ = 0;
};

// -- on disk: one mapped file, see Note [Memory of a file] ----------------------------------------
//
// The parts of a unit lie one after the other, each on pages of its own. An update reads and writes
// all parts from the first trained weight on; an all-gather reads only the parameters.

struct DiskUnit {
  ByMemory<Range> parts; // ranges of the file; empty if the part is not on disk
  Range updated; // the range of the file that an update reads and writes
};

class DiskLayout {
 public:
  // Units in memory at a time: one is read, one is updated, one is written.
  static constexpr int kNumUpdated = 3;
  static constexpr int kNumLoaded = 2; // one unit is copied while the next is read

  explicit DiskLayout(const Tiers& tiers) : tiers_(tiers) {}
  // Adds the next unit.
  void add(const Layout& layout, const UnitMesh& mesh);

  const std::vector<DiskUnit>& units() const {
    return units_;
  }
  int64_t file_nbytes() const {
    return file_nbytes_;
  }
  // Returns the peak memory of updates and loads.
  int64_t buffers_nbytes() const;

 private:
  Range take(int64_t nbytes);

  Tiers tiers_;
  std::vector<DiskUnit> units_;
  int64_t file_nbytes_ = 0;
};

} // namespace zerocore
