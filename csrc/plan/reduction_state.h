// Facts about gradients while they are packed, reduced and kept; integers only.
#pragma once

#include <algorithm>
#include <vector>

#include "plan/reduction_facts.h"

namespace zerocore {

struct RegionState {
  bool trainable = true;
  bool kept = false; // has memory that stays
  bool local = false; // the full bucket holds sums that were not reduced
  bool adds = false; // what is being reduced is added to the gradient
  bool across = false; // a StartAcross is to be waited for
  bool is_bare = false; // the local sums have no scale yet
  Memory result = Memory::Kept; // of the reduction
  ByMemory<bool> held = {}; // blocks of the pool
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
