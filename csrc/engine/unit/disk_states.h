// The states of units on disk: the memory of their buckets and moments, brought in for updates and
// read for gathers. See Note [Memory of a file] and Note [Swapping].
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/unit/disk_loads.h"
#include "engine/unit/unit.h"
#include "plan/disk_layout.h"
#include "runtime/swapped_units.h"

namespace zerocore {

class DiskStates {
 public:
  DiskStates() = default; // of nothing until open()
  DiskStates(const DiskStates&) = delete;
  DiskStates& operator=(const DiskStates&) = delete;

  // Reserves the file. `name`: of this rank's states, in errors. The units outlive it. Throws
  // std::system_error where there is no room.
  void open(
      const std::string& folder,
      const std::string& name,
      const Units& units,
      const UnitContext& context);
  // Of a unit's part, zeros at first.
  c10::DataPtr memory(UnitId unit, StatePart part) const;
  // Writes what was filled by hand, and frees its memory.
  void store(UnitId unit);
  // Throws what went wrong with the file.
  void check() const;

  // -- updates. Any thread says that one is coming, and one carries them out.
  void announce(UnitId unit) {
    coming_[unit] = true;
  }
  // The units that will be updated, in order.
  void begin_step(std::vector<UnitId> order);
  // The unit's bytes are in memory; what was brought stays until it is given back.
  void bring(UnitId unit);
  // The unit has changed and goes to the file, where gathers read it.
  void give_back(UnitId unit);
  // Everything is in the file.
  void end_step();

  // -- gathers
  DiskLoads& loads() {
    return *loads_;
  }
  // Anybody may have changed parameters since the last load.
  void forget_loads() {
    if (loads_ != nullptr) {
      loads_->forget();
    }
  }

  int64_t file_nbytes() const {
    return units_ == nullptr ? 0 : layout_->file_nbytes();
  }
  int64_t buffers_nbytes() const {
    return units_ == nullptr ? 0 : layout_->buffers_nbytes();
  }
  // In the child of a fork: nothing is waited for.
  void mark_forked() {
    static_cast<void>(swapped_.release());
    static_cast<void>(loads_.release());
  }

 private:
  const Units* units_ = nullptr;
  std::optional<DiskLayout> layout_;
  std::unique_ptr<SwappedUnits> swapped_;
  std::unique_ptr<DiskLoads> loads_; // ends before the file does
  std::vector<bool> brought_; // by unit
  std::unique_ptr<std::atomic<bool>[]> coming_; // by unit: an update that the file does not have
};

} // namespace zerocore
