// Facts about gradients while they are packed, reduced and kept: the rank that sums, the sizes of
// blocks, and what has been done; integers only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/types.h"
#include "plan/layout.h"
#include "plan/shard_options.h"
#include "plan/unit_mesh.h"

namespace zerocore {

struct ReductionOptions {
  ShardOptions sharding;
  bool on_host = false; // collectives run on no stream: the host waits for them
};

// A unit whose gradients are reduced.
struct ReducedUnit {
  const Layout* layout = nullptr;
  UnitMesh mesh;
};

using RegionKey = std::pair<UnitId, int>; // unit and region

class ReductionFacts {
 public:
  // The units' layouts outlive it.
  ReductionFacts(const ReductionOptions& options_, std::vector<ReducedUnit> units_)
      : options(options_), units(std::move(units_)) {}

  const ReductionOptions options;
  const std::vector<ReducedUnit> units;

  const Layout& layout_of(UnitId unit) const {
    return *units[unit].layout;
  }
  const UnitMesh& mesh_of(UnitId unit) const {
    return units[unit].mesh;
  }
  const Region& region_of(RegionKey key) const {
    return layout_of(key.first).regions()[key.second];
  }
  // Sums over the replicas start when the host knows the first ones, see Note [Replicas].
  bool hands_across(UnitId unit) const {
    return options.on_host && sums_at_once_across(unit);
  }
  // They run right behind the first ones.
  bool runs_across(UnitId unit) const {
    return !options.on_host && sums_at_once_across(unit);
  }
  // See Note [Gradients on the host].
  bool offloads_grads() const {
    return options.sharding.tiers.lands_gradients(options.on_host);
  }
  bool is_wired(RegionKey key) const {
    return mesh_of(key.first).communicates() &&
        (mesh_of(key.first).sums_in_order || region_of(key).has_wire());
  }
  // See Note [Scale of gradients].
  bool splits_scale(RegionKey key) const {
    return is_wired(key) && (mesh_of(key.first).sums_in_order || !offloads_grads());
  }
  // Whether the collective leaves its parts in a block of their own.
  bool takes_scratch(UnitId unit) const {
    return mesh_of(unit).parts() > 1 || mesh_of(unit).shards_across;
  }
  // Where the last collective leaves its result, unless it is as the first one does.
  Memory last_result(UnitId unit, Memory first) const {
    return mesh_of(unit).shards_across ? Memory::Across : first;
  }
  // Of a place; of this rank's part of the sum over the ranks that share the state.
  int64_t nbytes_at(RegionKey key, Memory place) const {
    const Region& region = region_of(key);
    const UnitMesh& mesh = mesh_of(key.first);
    switch (place) {
      case Memory::Kept:
        return region.grad.itemsize * (mesh.shards_gradients ? region.shard_numel : region.numel());
      case Memory::FullGrad:
        return region.grad.itemsize * region.numel();
      case Memory::Wire:
        return region.reduce.itemsize * region.numel();
      case Memory::Sums: // and what comes from the replicas
        return region.grad.itemsize * region.shard_numel * mesh.num_across() *
            (mesh.sums_across() ? 2 : 1);
      case Memory::Scratch:
        if (mesh.sums_in_order) {
          return region.reduce.itemsize * region.numel();
        }
        return mesh.state.parts() * result_nbytes(key);
      default:
        return 0;
    }
  }
  int64_t result_nbytes(RegionKey key) const {
    const Region& region = region_of(key);
    return region.reduce.itemsize * region.shard_numel * region.num_across;
  }

 private:
  bool sums_at_once_across(UnitId unit) const {
    return mesh_of(unit).sums_across() && !mesh_of(unit).sums_in_order;
  }
};

struct RegionState {
  bool trainable = true;
  bool kept = false; // has memory that stays
  bool local = false; // the full bucket holds sums that were not reduced
  bool adds = false; // what is being reduced is added to the gradient
  bool across = false; // what started last is to be waited for
  bool is_bare = false; // the local sums have no scale yet
  Memory result = Memory::Kept; // of the reduction
  ByMemory<bool> held; // blocks of the pool
};

struct ParamState {
  bool valid = false; // the kept gradient holds a value
  bool local = false; // the local sums include this parameter
};

class ReductionState {
 public:
  explicit ReductionState(const ReductionFacts& facts) : facts_(facts) {
    for (const ReducedUnit& unit : facts.units) {
      params_.emplace_back(unit.layout->places().size());
      regions_.emplace_back();
      for (const Region& region : unit.layout->regions()) {
        regions_.back().emplace_back().trainable = region.requires_grad;
      }
    }
  }

  RegionState& of(RegionKey key) {
    return regions_.at(key.first).at(key.second);
  }
  const RegionState& of(RegionKey key) const {
    return regions_.at(key.first).at(key.second);
  }
  std::vector<ParamState>& params(UnitId unit) {
    return params_.at(unit);
  }
  const std::vector<ParamState>& params(UnitId unit) const {
    return params_.at(unit);
  }
  bool any_valid(RegionKey key) const {
    return std::ranges::any_of(
        facts_.region_of(key).params, [&](int param) { return params_[key.first][param].valid; });
  }
  bool any_summed(RegionKey key) const {
    return std::ranges::any_of(
        facts_.region_of(key).params, [&](int param) { return params_[key.first][param].local; });
  }
  bool any_local(UnitId unit) const {
    return std::ranges::any_of(regions_.at(unit), &RegionState::local);
  }
  // Of all units.
  std::vector<RegionKey> regions() const {
    std::vector<RegionKey> keys;
    for (UnitId unit = 0; unit < static_cast<UnitId>(regions_.size()); ++unit) {
      const std::vector<RegionKey> own = regions(unit);
      keys.insert(keys.end(), own.begin(), own.end());
    }
    return keys;
  }
  std::vector<RegionKey> regions(UnitId unit) const {
    std::vector<RegionKey> keys;
    for (int region = 0; region < static_cast<int>(regions_.at(unit).size()); ++region) {
      keys.emplace_back(unit, region);
    }
    return keys;
  }
  std::vector<RegionKey> trained_regions(UnitId unit) const {
    std::vector<RegionKey> keys = regions(unit);
    std::erase_if(keys, [&](const RegionKey& key) { return !of(key).trainable; });
    return keys;
  }

 private:
  const ReductionFacts& facts_;
  std::vector<std::vector<RegionState>> regions_; // by unit
  std::vector<std::vector<ParamState>> params_; // by unit
};

} // namespace zerocore
