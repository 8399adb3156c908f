// Moments of AdamW.
#include "engine/offload/moments.h"

namespace zerocore {

Moments::Moments(const Units& units, const UnitContext& context) {
  for (const auto& unit : units) {
    OfUnit& own = units_.emplace_back(OfUnit{*unit, {}, {}});
    own.given.resize(unit->params().size());
    const Layout main =
        unit->layout().of_shard(unit->context().mesh.shard()).retyped(&Region::main);
    const std::vector<int> regions = Tiers::trained_regions(main);
    if (regions.empty()) {
      continue;
    }
    const std::string owner = "the moments of unit '" + unit->name() + "'";
    for (const Memory part : {Memory::ExpAvg, Memory::ExpAvgSq}) {
      auto& bucket = own.buckets[part == Memory::ExpAvg ? 0 : 1];
      bucket.emplace(main, regions, 0, c10::kCPU, owner);
      bucket->attach(context.memory_of(context.tiers.states, unit->id(), part, *bucket));
    }
  }
}

std::vector<at::Tensor> Moments::make(UnitId id, int param) {
  OfUnit& own = units_.at(id);
  const Unit& unit = own.unit;
  const int region = unit.layout().places().at(param).region;
  if (!own.buckets[0] || !own.buckets[0]->has(region)) {
    return {};
  }
  std::optional<Given>& given = own.given.at(param);
  if (given && !given->expired()) {
    return {};
  }
  const int64_t offset = unit.layout().offset_in_shard(param, unit.context().mesh.shard());
  std::vector<at::Tensor> made;
  for (const auto& bucket : own.buckets) {
    made.push_back(bucket->view(region, offset, unit.shard_sizes(param)));
    if (given) {
      made.back().zero_(); // those of an optimizer that is gone
    }
  }
  given.emplace(made.front().getIntrusivePtr());
  return made;
}

} // namespace zerocore
