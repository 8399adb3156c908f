// Decides where gradients are packed, what they are added to, and when they are reduced; integers
// only.
//
// Note [Where gradients live]
// stage 0, 1   Gradients are packed into persistent memory, and reduced in place. The optimizer
//              sees this rank's slice of it (stage 0: all of it).
// stage 2, 3   Gradients are packed into a block of the pool, and reduced into a persistent shard.
//              The block is freed.
// While gradients accumulate without communication, FullGrad holds this rank's own sums (`local`).
// Packing scales gradients by 1 / world size. Local sums that `.grad` shows, as in
// DistributedDataParallel, are scaled when they are reduced.
//
// Note [Gradients on the wire]
// Gradients may travel in another dtype than the dtype of kept gradients. They are then packed
// (local sums: cast) into a block of that dtype, reduced there, and added to the kept gradient.
//
// Note [Replicas]
// In hybrid sharding a second collective sums the reduced shards over the replicas. On a device it
// runs on a stream of its own, right after the unit's reductions. On the CPU it starts when the
// host has the first sum; the reduction of the next unit waits for that. If the first sum is in its
// final place, only the end of the backward waits for the second one.
//
// If the optimizer's states are sharded over the replicas, too, the second collective is a
// reduce-scatter. Its result is added to the gradient before the next reduction.
//
// Note [Sums in order]
// Gradients travel in a dtype of their own. Each rank sums its part of them in the dtype of kept
// gradients and in the order of ranks, so the sum does not depend on other tensors in the launch.
// Replicas exchange parts of these sums (`Sums`) in the same way. A rank that keeps a larger part
// than it sums gathers the rest from the others at the end.
//
// Note [Scale of gradients]
// If gradients travel in one dtype and are summed in another, packing applies only a part of their
// scale, and the sum applies the rest. Local sums already have the full scale, so their cast to the
// wire's dtype undoes the rest.
//
// Note [Gradients on the host]
// If a device keeps its gradients on the host, a reduction writes its result to a block of the
// pool, and a copy to the host follows. Without a collective the block has the packed gradients.
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

// -- facts that do not change ---------------------------------------------------------------------

struct ReductionOptions {
  ShardOptions sharding;
  bool on_host = false; // the host waits for collectives, which run on no stream
};

// A unit whose gradients are reduced.
struct ReducedUnit {
  const Layout* layout = nullptr;
  UnitMesh mesh;
};

using RegionKey = std::pair<UnitId, int>; // unit and region

// Answers questions about a unit's mesh and layout: which collectives run, in which memory, of what
// size.
class ReductionFacts {
 public:
  // The units' layouts must outlive the object.
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
  // Returns whether the sum over the replicas starts when the host has the first sum, see Note
  // [Replicas].
  bool hands_sums_across(UnitId unit) const {
    return options.on_host && sums_at_once_across(unit);
  }
  // Returns whether it starts right after the first collective, on a stream of its own.
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
  // Returns whether the collective writes its result to Scratch.
  bool takes_scratch(UnitId unit) const {
    return mesh_of(unit).parts() > 1 || mesh_of(unit).shards_across;
  }
  // Returns the memory of the last collective's result; `first` is the memory of the first one's.
  Memory last_result(UnitId unit, Memory first) const {
    return mesh_of(unit).shards_across ? Memory::Across : first;
  }
  // Returns the size of a region's memory.
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
      case Memory::Sums: // with replicas, also the parts that they send
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
  // Returns the size of this rank's part of the sum over the ranks that share the state.
  int64_t result_nbytes(RegionKey key) const {
    const Region& region = region_of(key);
    return region.reduce.itemsize * region.shard_numel * region.num_across;
  }

 private:
  bool sums_at_once_across(UnitId unit) const {
    return mesh_of(unit).sums_across() && !mesh_of(unit).sums_in_order;
  }
};

// -- state ----------------------------------------------------------------------------------------

struct RegionState {
  bool trainable = true;
  bool kept = false; // the kept gradient has memory
  bool local = false; // FullGrad holds local sums that were not reduced
  bool adds = false; // the running reduction adds to the kept gradient
  bool across = false; // must wait for the last collective: over the replicas, or of sums
  bool is_unscaled = false; // the local sums are not scaled yet
  Memory result = Memory::Kept; // the memory of the reduction's result
  ByMemory<bool> held; // blocks of the pool that the region holds
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
  // The units' layouts must outlive the object.
  Reduction(const ReductionOptions& options, std::vector<ReducedUnit> units);
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  // Packs the unit's gradients and starts their reduction. Without sync it may only sum them on
  // this rank; it then returns false. With `averages`, each rank adds its own old gradient of stage
  // 0 to the next average, as under DistributedDataParallel.
  bool reduce(UnitId unit, bool sync, Steps& steps, bool averages = false);
  // Ends a backward: completes all reductions.
  void finish(Steps& steps);
  // Forgets reductions, and local sums that `.grad` does not show. Frees all blocks, whichever
  // steps were carried out.
  void reset(Steps& steps);

  // Sets whether the region's parameters get gradients; the layout has the first value.
  void set_trainable(UnitId unit, int region, bool trainable) {
    state_.of({unit, region}).trainable = trainable;
  }
  // Returns whether the parameter's kept gradient holds a value.
  bool is_valid(UnitId unit, int param) const {
    return state_.params(unit).at(param).valid;
  }
  void set_valid(UnitId unit, int param, bool valid) {
    state_.params(unit).at(param).valid = valid;
  }
  // Forgets the parameter's gradient and its local sums.
  void drop(UnitId unit, int param) {
    state_.params(unit).at(param) = {};
  }
  // Returns the parameter's elements, as a range of the region, that a Pack adds to; it overwrites
  // the others. A Pack that adds to none gets an empty range at the parameter's begin.
  Range added(const Step& pack, int param) const;
  // Returns whether the unit's gradients are final in this step: its last reduction was with sync.
  bool is_final(UnitId unit) const {
    return final_.at(unit);
  }
  // Returns whether reduce() only sums the unit's gradients on this rank.
  bool holds(UnitId unit, bool sync) const {
    return !sync && (!facts_.mesh_of(unit).shards_gradients || facts_.options.sharding.hold_full);
  }
  // Returns whether this rank has local sums of the unit that were not reduced.
  bool has_local(UnitId unit) const {
    return state_.any_local(unit);
  }
  // Returns whether `.grad` shows unscaled local sums of the region, in the persistent memory.
  bool shows_sums(UnitId unit, int region) const {
    const RegionState& state = state_.of({unit, region});
    return state.local && state.is_unscaled && !facts_.mesh_of(unit).shards_gradients;
  }
  // Returns the bytes of the unit's kept gradients.
  int64_t kept_nbytes(UnitId unit) const;

 private:
  using Key = RegionKey;

  bool is_in_flight(UnitId unit) const;
  size_t most_beside(UnitId unit) const;

  Memory target(Key key, bool holds) const;
  bool holds_unscaled(Key key) const;
  bool can_average_again(Key key) const;
  void pack(Key key, bool holds, bool averages, Steps& steps);
  // Takes a block of the pool unless the region holds it already.
  void take(Key key, Memory memory, Steps& steps);
  // Frees all blocks; on the way to the host, `copied` is freed after its copy.
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
  std::deque<std::vector<Key>> in_flight_; // regions of the units being reduced, oldest first
};

} // namespace zerocore
