// The states of units on disk.
#include "engine/unit/disk_states.h"

#include <system_error>

namespace zerocore {

void DiskStates::open(
    const std::string& folder,
    const std::string& name,
    const Units& units,
    const UnitContext& context) {
  DiskLayout layout(context.tiers);
  SwapOptions options{folder, name, {}, {}, 0, DiskLayout::kNumUpdateBuffers};
  std::vector<Range> parameters;
  for (const auto& unit : units) {
    layout.add(unit->layout(), unit->context().mesh);
    options.unit_names.push_back(unit->name());
    options.ranges.push_back(layout.units().back().updated);
    parameters.push_back(layout.units().back().part(StatePart::Parameters));
  }
  options.file_nbytes = layout.file_nbytes();
  swapped_ = std::make_unique<SwappedUnits>(options);
  units_ = &units;
  brought_.resize(units.size());
  coming_ = std::make_unique<std::atomic<bool>[]>(units.size());
  const auto version_of = [this](UnitId unit) {
    return coming_[unit] ? std::nullopt : std::optional((*units_)[unit]->version());
  };
  loads_ = std::make_unique<DiskLoads>(
      *swapped_, std::move(parameters), layout.load_nbytes(), version_of);
  layout_.emplace(std::move(layout));
}

c10::DataPtr DiskStates::memory(UnitId unit, StatePart part) const {
  TORCH_INTERNAL_ASSERT(units_ != nullptr, "the disk was not opened");
  return swapped_->memory()->at(layout_->units()[unit].part(part).begin);
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
  if (!layout_->units()[unit].part(StatePart::Parameters).empty()) {
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
