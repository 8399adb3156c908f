// Begins the first gather of a forward at an optimizer's step.
#include "engine/first_gather.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace zerocore {

void FirstGather::begin_update(const std::vector<UnitId>& units) {
  if (!is_on()) {
    return;
  }
  ++num_steps_;
  if (std::find(units.begin(), units.end(), pending_) != units.end()) {
    drop();
  }
}

void FirstGather::begin() {
  const at::NoGradGuard no_grad;
  const UnitId id = parts_.schedule.order().front().unit;
  Unit& unit = *parts_.units[id];
  if (parts_.schedule.is_resident(id)) {
    return;
  }
  casts_ = !unit.is_cast();
  in_use_.refresh(id);
  in_use_.order_gathers();
  unit.gathers().sent().expect();
  pending_ = id;
  try {
    parts_.schedule.residency().gather_ahead(id, parts_.actions);
    in_use_.run(parts_.actions);
  } catch (...) {
    give_back();
    in_use_.settle();
    throw;
  }
}

void FirstGather::drop() {
  if (pending_ >= 0) {
    give_back();
    in_use_.run(parts_.actions);
  }
}

void FirstGather::give_back() {
  parts_.schedule.residency().drop_ahead(std::exchange(pending_, -1), parts_.actions);
}

void FirstGather::begin_pass() {
  if (num_steps_ > 0) {
    expected_steps_ = std::exchange(num_steps_, 0);
  }
  if (pending_ >= 0) {
    in_use_.check_homes(pending_);
  }
  used_ = std::exchange(pending_, -1);
  if (used_ < 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  Unit& unit = *parts_.units[used_];
  // The comparison is of weights as layers compute with them, those that a gather would send now.
  if (casts_ || !unit.is_cast()) {
    unit.wait_for_unshard(); // it sends what this writes
    unit.main().cast();
    unit.mark_cast();
  }
  if (parts_.peers != nullptr) { // else whoever counts the change gathers again
    unit.mark_fresh();
  }
  unit.gathers().sent().arm();
  if (unit.state() == UnitState::Unsharded) { // somebody has waited for it already
    unit.gathers().sent().compare();
  }
}

std::optional<StaleWeight> FirstGather::take_stale() {
  if (used_ < 0) {
    return std::nullopt;
  }
  Unit& unit = *parts_.units[used_];
  unit.wait_for_unshard(); // this rank may have skipped it
  const auto changed = unit.gathers().sent().take_changed();
  const UnitId id = std::exchange(used_, -1);
  if (!changed) {
    return std::nullopt;
  }
  const Layout& layout = unit.layout();
  const Region& region = layout.regions()[changed->region];
  const int64_t element = changed->word * static_cast<int64_t>(sizeof(int64_t)) / region.itemsize;
  int found = region.params.front();
  for (const int param : region.params) { // in the order of their places
    const int64_t shard = parts_.context.shard;
    if (!layout.owned(param, shard).empty() && layout.offset_in_shard(param, shard) <= element) {
      found = param;
    }
  }
  return StaleWeight{parts_.peers->rank(), id, found};
}

} // namespace zerocore
