// Decides where gradients are packed, whether they add, and when they are reduced; integers only.
//
// Note [Where gradients live]
// stage 0, 1   packed into memory that stays, reduced in place. The gradient that the optimizer
//              sees is this rank's slice of it (stage 0: all of it).
// stage 2, 3   packed into a block of the pool, reduced into a shard that stays, the block given
//              back.
// While gradients accumulate without communication the full bucket holds this rank's own sums
// (`local`). Gradients are scaled by 1 / world size when they are packed; sums that are shown, as
// DistributedDataParallel shows them, when they are reduced.
//
// Note [Gradients on the wire]
// Where gradients travel in another type than they are kept in, they are packed (local sums: cast)
// into a block of the pool of that type, reduced there, and added to the gradient that is kept.
//
// Note [Replicas]
// With hybrid sharding the reduced shards are summed once more, over the ranks that hold the same
// one. On a device that runs on a stream of its own, right behind the unit's reductions. On the
// CPU it starts when the first sum is known, which is asked for when the next unit is reduced;
// where that sum is in its final place the second one is only waited for at the end of the
// backward.
//
// Where the optimizer's states are sharded over the replicas, too, the second collective is a
// reduce-scatter. Its result is added to the gradient before the next reduction.
//
// Note [Sums in order]
// Gradients travel in a type of their own, and every rank sums its part of them in the type that
// they are kept in, in the order of ranks: the sum does not depend on what else travels. Where
// there are replicas, they exchange parts of these sums (`Sums`), too. A rank that keeps more than
// it sums gathers the rest from the others, last.
//
// Note [Scale of gradients]
// Gradients that are summed in another type than they travel in get only a part of their scale when
// they are packed, and the rest with the sum. Local sums have all of it, and lose the rest where
// they are cast.
//
// Note [Gradients on the host]
// Where a device keeps its gradients on the host, a reduction leaves its result in a block, which
// is copied from there. Without a collective it is the packed gradients themselves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "common/types.h"
#include "plan/layout.h"
#include "plan/shard_options.h"
#include "plan/steps.h"
#include "plan/unit_mesh.h"

namespace zerocore {

// -- facts: the rank that sums, the sizes of blocks, and what has been done -----------------------

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
  // The all-reduce over replicas starts once the host knows the sums within them: Note [Replicas].
  bool hands_sums_across(UnitId unit) const {
    return options.on_host && sums_at_once_across(unit);
  }
  // They run right behind the first ones.
  bool runs_sums_across(UnitId unit) const {
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

class Reduction {
 public:
  // The units' layouts outlive it.
  Reduction(const ReductionOptions& options, std::vector<ReducedUnit> units);
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  // Packs the unit's gradients and starts their reduction. Without sync they may only be summed on
  // this rank; false then.
  bool reduce(UnitId unit, bool sync, Steps& steps);
  // Ends a backward: completes everything.
  void finish(Steps& steps);
  // Forgets reductions and local sums. Gives back all blocks, whatever was carried out.
  void reset(Steps& steps);

  // Whether the region's parameters get gradients; at first as its layout says.
  void set_trainable(UnitId unit, int region, bool trainable) {
    state_.of({unit, region}).trainable = trainable;
  }
  // Whether the parameter's kept gradient holds a value.
  bool is_valid(UnitId unit, int param) const {
    return state_.params(unit).at(param).valid;
  }
  void set_valid(UnitId unit, int param, bool valid) {
    state_.params(unit).at(param).valid = valid;
  }
  // Forgets what is known of the parameter's gradient, sums of this rank included.
  void drop(UnitId unit, int param) {
    state_.params(unit).at(param) = {};
  }
  // During a Pack: the parameter's elements of the region that are added to; empty, at its
  // beginning, for none. The others are overwritten.
  Range added(const Step& pack, int param) const;
  // Whether the ranks are not to add to the unit's gradients in this step: it was reduced last with
  // sync.
  bool is_final(UnitId unit) const {
    return final_.at(unit);
  }
  // Whether this rank has sums of the unit that were not reduced.
  bool has_local(UnitId unit) const {
    return state_.any_local(unit);
  }
  // Whether the memory that stays holds this rank's sums of the region as they are.
  bool shows_sums(UnitId unit, int region) const {
    const RegionState& state = state_.of({unit, region});
    return state.local && state.is_bare && !facts_.mesh_of(unit).shards_gradients;
  }
  // Bytes of memory that stays.
  int64_t kept_nbytes(UnitId unit) const;

 private:
  using Key = RegionKey;

  // Sums of this rank, unless its backward communicates.
  bool holds(UnitId unit, bool sync) const {
    return !sync && (!facts_.mesh_of(unit).shards_gradients || facts_.options.sharding.hold_full);
  }
  bool is_in_flight(UnitId unit) const;
  size_t most_beside(UnitId unit) const;

  Memory target(Key key, bool holds) const;
  bool holds_bare(Key key) const;
  void pack(Key key, bool holds, Steps& steps);
  // Takes a block of the pool unless it is held; gives all back, of which the host copies `copied`.
  void take(Key key, Memory memory, Steps& steps);
  void free_all(Key key, Memory copied, Steps& steps);

  void issue(Key key, Steps& steps);
  void choose_result(Key key, Steps& steps);
  void complete_until(size_t most, Steps& steps);
  void complete(Key key, Steps& steps);
  void complete_across(Key key, Steps& steps);
  void complete_in_order(Key key, Steps& steps);
  void start_across(Key key, Memory from, Steps& steps);
  void wait_across(Key key, Steps& steps);
  void grad_ready(Key key, Steps& steps);
  ScalePart rest_of_scale(Key key) const;
  void sum_parts(Key key, Memory to, ScalePart scale, Steps& steps);
  void zero_invalid(Key key, Steps& steps);
  void offload_grad(Key key, Memory from, Steps& steps);
  void add_to_kept(Key key, Memory from, int64_t parts, Steps& steps);

  ReductionFacts facts_;
  ReductionState state_;
  std::vector<bool> final_; // by unit
  std::deque<std::vector<Key>> in_flight_; // by unit, oldest first
};

} // namespace zerocore
