// The states of a model on the host and on disk: the memory of its units' buckets and moments.
#pragma once

#include <c10/core/Allocator.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/unit/unit.h"
#include "memory/file_memory.h"
#include "memory/host_memory.h"
#include "plan/state_layout.h"

namespace zerocore {

// The states of a model in the host's memory: one mapping, of the size that the plan says, and the
// memory of the units' buckets in it.
class HostStates {
 public:
  HostStates() = default; // of nothing until plan()
  HostStates(const HostStates&) = delete;
  HostStates& operator=(const HostStates&) = delete;

  // Takes no memory.
  void plan(const Units& units, const UnitContext& context);
  // Maps the planned memory, and pins the part that a CUDA device copies. Throws c10::Error where
  // there is too little.
  void open();
  // Of a unit's part, zeros at first.
  c10::DataPtr memory(UnitId unit, Memory part) const;
  // Of a region's gradient. One that was frozen when the model was sharded has none.
  c10::DataPtr gradient(UnitId unit, int region) const;

  const HostLayout& layout() const {
    return *layout_;
  }
  // Null before open().
  const std::shared_ptr<HostMemory>& mapped() const {
    return memory_;
  }

 private:
  c10::DataPtr at(const Range& range) const;

  std::optional<HostLayout> layout_;
  HostMemoryOptions options_;
  std::shared_ptr<HostMemory> memory_;
};

// The states of units on disk are read ahead of updates and gathers and written behind them. See
// Note [Memory of a file].
class DiskStates {
 public:
  DiskStates() = default; // of nothing until open()
  DiskStates(const DiskStates&) = delete;
  DiskStates& operator=(const DiskStates&) = delete;

  // Reserves the file. `name`: of this rank's states, in errors. Throws std::system_error where
  // there is no room.
  void open(
      const std::string& folder,
      const std::string& name,
      const Units& units,
      const UnitContext& context);
  // Of a unit's part, zeros at first.
  c10::DataPtr memory(UnitId unit, Memory part) const;
  // Writes what was filled by hand, and frees its memory.
  void store(UnitId unit) const;
  // Throws what went wrong with an update, every time, for bytes are lost.
  void check() const;

  // -- updates, by one thread. Throw as check().
  // The units that will be updated, in order.
  void begin_step(std::vector<UnitId> order);
  // Reads the unit, and lets a thread begin to read the next one.
  void bring(UnitId unit);
  // The unit has changed: begins to write it, and frees the memory of the one before.
  void give_back(UnitId unit);
  // Everything is in the file.
  void end_step();

  // -- gathers, by another thread
  // Reads the unit's parameters, and lets a thread begin to read those of the next unit in the
  // direction of the pass. Frees the memory of the unit that was loaded before, whose parameters
  // have been copied. An error is kept and not thrown, so that all ranks come to the gather.
  void load(UnitId unit);
  // Whether the parameters may be touched.
  bool is_loaded() const {
    return load_failure_ == nullptr;
  }
  // The error of a load since the last call, or null.
  std::exception_ptr take_load_failure() {
    return std::exchange(load_failure_, nullptr);
  }

  // In the child of a fork, where no thread reads ahead: nothing is waited for.
  void mark_forked();

  int64_t file_nbytes() const {
    return layout_ ? layout_->file_nbytes() : 0;
  }
  int64_t buffers_nbytes() const {
    return layout_ ? layout_->buffers_nbytes() : 0;
  }

 private:
  template <typename Call>
  void run(const Call& call); // and keeps its error
  void finish_write();
  void read_ahead(std::jthread& thread, const Range& range);
  const Range& parameters(UnitId unit) const {
    return layout_->units().at(unit).parts[Memory::Shard];
  }

  std::optional<DiskLayout> layout_;
  std::vector<std::string> labels_; // of units, in errors
  std::shared_ptr<FileMemory> file_;
  std::vector<UnitId> order_;
  std::vector<bool> brought_; // by unit
  UnitId written_ = -1; // the unit whose write has begun
  std::exception_ptr failure_;
  UnitId loaded_ = -1; // the unit that was loaded last
  std::exception_ptr load_failure_;
  // MADV_WILLNEED needs no thread, but reads a few MiB at most, and into small pages.
  std::jthread updates_ahead_, loads_ahead_; // last: they read the file
};

} // namespace zerocore
