// What units have on disk.
#include "engine/disk_states.h"

#include <system_error>

#include "runtime/device_memory.h"

namespace zerocore {

c10::DataPtr UnitContext::memory_of(Tier tier, UnitId unit, DiskPart part, int64_t nbytes) const {
  return tier == Tier::Disk ? disk->memory(unit, part) : allocate_memory(device_of(tier), nbytes);
}

at::Tensor UnitContext::loaded(const at::Tensor& shard) const {
  return tiers.parameters == Tier::Disk ? disk->loads().loaded(shard) : shard;
}

void DiskStates::open(const DiskPlace& place) {
  DiskLayout layout(context_.tiers, context_.policy.shards_parameters(), context_.shard);
  SwapOptions options{place.folder, place.name, {}, {}, 0, DiskLayout::kNumUpdateBuffers};
  std::vector<Range> parameters;
  for (const auto& unit : units_) {
    layout.add(unit->layout());
    options.unit_names.push_back(unit->name());
    options.ranges.push_back(layout.units().back().updated);
    parameters.push_back(layout.units().back().part(DiskPart::Parameters));
  }
  options.file_nbytes = layout.file_nbytes();
  swapped_ = std::make_unique<SwappedUnits>(options);
  brought_.resize(units_.size());
  coming_ = std::make_unique<std::atomic<bool>[]>(units_.size());
  loads_ = std::make_unique<DiskLoads>(
      *swapped_, std::move(parameters), layout.load_nbytes(), version_of());
  layout_.emplace(std::move(layout));
  make_buckets();
}

DiskLoads::VersionOf DiskStates::version_of() const {
  return [this](UnitId unit) -> std::optional<int64_t> {
    return coming_[unit] ? std::nullopt : std::optional(units_[unit]->version());
  };
}

void DiskStates::make_buckets() {
  for (const auto& unit : units_) {
    Moments& moments = moments_.emplace_back();
    moments.given.resize(unit->params().size());
    const DiskUnit& place = layout_->units()[unit->id()];
    if (place.part(DiskPart::ExpAvg).empty()) {
      continue;
    }
    const Layout main = unit->layout().of_shard(context_.shard).retyped(&Region::main);
    const std::vector<int> regions = Tiers::trained_regions(main);
    const std::string owner = "the moments of unit '" + unit->name() + "'";
    for (const DiskPart part : {DiskPart::ExpAvg, DiskPart::ExpAvgSq}) {
      auto& bucket = moments.buckets[part == DiskPart::ExpAvg ? 0 : 1];
      bucket.emplace(main, regions, 0, c10::kCPU, owner);
      bucket->attach(memory(unit->id(), part));
    }
  }
}

c10::DataPtr DiskStates::memory(UnitId unit, DiskPart part) const {
  TORCH_INTERNAL_ASSERT(layout_, "the disk was not opened");
  return swapped_->memory()->at(layout_->units()[unit].part(part).begin);
}

bool DiskStates::had_moments(UnitId unit, int param) const {
  return moments_.at(unit).given.at(param).has_value();
}

std::vector<at::Tensor> DiskStates::make_moments(UnitId id, int param) {
  const Unit& unit = *units_.at(id);
  Moments& moments = moments_.at(id);
  const int region = unit.layout().places().at(param).region;
  if (!moments.buckets[0] || !moments.buckets[0]->has(region)) {
    return {};
  }
  std::optional<Given>& given = moments.given.at(param);
  TORCH_CHECK_VALUE(
      !given || given->expired(),
      "parameter '",
      unit.params()[param].spec.fqn,
      "': an optimizer has its moments on disk, where there is room for those of one. Delete that "
      "optimizer first.");
  const int64_t offset = unit.layout().offset_in_shard(param, context_.shard);
  std::vector<at::Tensor> made;
  for (const auto& bucket : moments.buckets) {
    made.push_back(bucket->view(region, offset, unit.shard_sizes(param)));
    if (given) {
      made.back().zero_(); // those of an optimizer that is gone
    }
  }
  given.emplace(made.front().getIntrusivePtr());
  return made;
}

void DiskStates::store(UnitId unit) {
  const DiskUnit& place = layout_->units().at(unit);
  try {
    swapped_->memory()->store({place.parts.front().begin, place.parts.back().end});
  } catch (const std::system_error& error) {
    throw std::system_error(
        error.code(), "'" + swapped_->file().path() + "', " + swapped_->label(unit));
  }
}

void DiskStates::check() const {
  if (swapped_ != nullptr) {
    swapped_->check();
  }
}

// -- updates --------------------------------------------------------------------------------

void DiskStates::begin_step(std::vector<UnitId> order) {
  swapped_->expect(std::move(order));
}

void DiskStates::bring(UnitId unit) {
  if (!brought_[unit]) {
    swapped_->acquire(unit);
    brought_[unit] = true;
  }
}

void DiskStates::give_back(UnitId unit) {
  swapped_->check();
  if (brought_[unit]) {
    brought_[unit] = false;
    swapped_->release(unit, /*changed=*/true);
  }
  if (!layout_->units()[unit].part(DiskPart::Parameters).empty()) {
    swapped_->settle(unit);
  }
  coming_[unit] = false;
}

void DiskStates::end_step() {
  for (UnitId unit = 0; unit < static_cast<UnitId>(brought_.size()); ++unit) {
    if (brought_[unit]) { // whoever had it updated has failed
      give_back(unit);
    }
  }
  swapped_->finish();
}

} // namespace zerocore
