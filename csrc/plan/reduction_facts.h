// Facts of a reduction of gradients: the rank that sums, the sizes of blocks; integers only.
#pragma once

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

} // namespace zerocore
