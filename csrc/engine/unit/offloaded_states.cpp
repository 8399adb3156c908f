#include "engine/unit/offloaded_states.h"

#include <algorithm>
#include <exception>

#include "device/cuda_calls.h"

namespace zerocore {

void HostStates::plan(const Units& units, const UnitContext& context) {
  layout_.emplace(context.tiers, context.lands_gradients());
  for (const auto& unit : units) {
    layout_->add(unit->layout(), unit->context().mesh);
  }
  options_.nbytes = layout_->nbytes();
  options_.inherited = true; // a data loader's forked worker may read a parameter
  if (context.streams->device().is_cuda() && cuda_calls() != nullptr) {
    options_.pinned_nbytes = layout_->copied_nbytes();
  }
}

void HostStates::open() {
  memory_ = HostMemory::map(options_);
}

c10::DataPtr HostStates::at(const Range& range) const {
  TORCH_INTERNAL_ASSERT(memory_ != nullptr, "the host's memory was not mapped");
  return memory_->at(range.begin);
}

c10::DataPtr HostStates::memory(UnitId unit, Memory part) const {
  return at(layout_->part(unit, part));
}

c10::DataPtr HostStates::gradient(UnitId unit, int region) const {
  return at(layout_->gradient(unit, region));
}

void DiskStates::open(
    const std::string& folder,
    const std::string& name,
    const Units& units,
    const UnitContext& context) {
  layout_.emplace(context.tiers);
  for (const auto& unit : units) {
    layout_->add(unit->layout(), unit->context().mesh);
    labels_.push_back(name + " of unit '" + unit->name() + "'");
  }
  brought_.resize(units.size());
  file_ = std::make_shared<FileMemory>(folder, name, layout_->file_nbytes());
}

c10::DataPtr DiskStates::memory(UnitId unit, Memory part) const {
  TORCH_INTERNAL_ASSERT(file_ != nullptr, "the disk was not opened");
  return file_->at(layout_->units().at(unit).parts[part].begin);
}

void DiskStates::store(UnitId unit) const {
  const DiskUnit& place = layout_->units().at(unit);
  file_->write({place.parts[Memory::Shard].begin, place.parts[Memory::Kept].end}, labels_[unit]);
}

void DiskStates::check() const {
  if (failure_ != nullptr) {
    std::rethrow_exception(failure_);
  }
}

template <typename Call>
void DiskStates::run(const Call& call) {
  check();
  try {
    call();
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

// -- updates --------------------------------------------------------------------------------

void DiskStates::begin_step(std::vector<UnitId> order) {
  order_ = std::move(order);
}

void DiskStates::bring(UnitId unit) {
  if (brought_[unit]) {
    return;
  }
  run([&] { file_->read(layout_->units()[unit].updated, /*writes=*/true, labels_[unit]); });
  brought_[unit] = true;
  auto next = std::ranges::find(order_, unit);
  if (next != order_.end() && ++next != order_.end()) {
    read_ahead(updates_ahead_, layout_->units()[*next].updated);
  }
}

void DiskStates::give_back(UnitId unit) {
  check();
  if (brought_[unit]) {
    brought_[unit] = false;
    file_->begin_write(layout_->units()[unit].updated);
    finish_write();
    written_ = unit;
  }
}

void DiskStates::finish_write() {
  if (const UnitId unit = std::exchange(written_, -1); unit >= 0) {
    run([&] { file_->write(layout_->units()[unit].updated, labels_[unit]); });
  }
}

void DiskStates::end_step() {
  for (UnitId unit = 0; unit < static_cast<UnitId>(brought_.size()); ++unit) {
    give_back(unit); // a unit whose update failed is still in memory
  }
  finish_write();
}

// -- gathers --------------------------------------------------------------------------------

void DiskStates::load(UnitId unit) {
  const UnitId before = std::exchange(loaded_, unit);
  const UnitId next = before < unit ? unit + 1 : unit - 1;
  if (before >= 0 && before != unit) {
    file_->drop(parameters(before));
  }
  try {
    file_->read(parameters(unit), /*writes=*/false, "the parameters, " + labels_[unit]);
    if (next >= 0 && next < static_cast<UnitId>(labels_.size())) {
      read_ahead(loads_ahead_, parameters(next));
    }
  } catch (...) {
    load_failure_ = std::current_exception();
  }
}

void DiskStates::read_ahead(std::jthread& thread, const Range& range) {
  thread = std::jthread([this, range] {
    try {
      file_->read(range, /*writes=*/false, "");
    } catch (const std::exception&) { // the read of the unit itself will fail again and throw
    }
  });
}

void DiskStates::mark_forked() {
  static_cast<void>(new std::jthread(std::move(updates_ahead_)));
  static_cast<void>(new std::jthread(std::move(loads_ahead_)));
}

} // namespace zerocore
