// The memory of offloaded states on the host or disk: units' buckets and optimizer states.
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

// A model's states in the host's memory: one mapping of the planned size, with a part for each
// bucket.
class HostStates {
 public:
  HostStates() = default; // call plan(), then open()
  HostStates(const HostStates&) = delete;
  HostStates& operator=(const HostStates&) = delete;

  // Computes the layout; takes no memory.
  void plan(const Units& units, const UnitContext& context);
  // Maps the planned memory, and pins the part that a CUDA device copies. Throws c10::Error if the
  // host has too little memory.
  void open();
  // Returns the memory of a unit's part; zeros at first.
  c10::DataPtr memory(UnitId unit, Memory part) const;
  // Returns the memory of a region's gradient. The region must have required grad in plan().
  c10::DataPtr gradient(UnitId unit, int region) const;

  const HostLayout& layout() const {
    return *layout_;
  }
  // Returns null before open().
  const std::shared_ptr<HostMemory>& mapped() const {
    return memory_;
  }

 private:
  c10::DataPtr at(const Range& range) const;

  std::optional<HostLayout> layout_;
  HostMemoryOptions options_;
  std::shared_ptr<HostMemory> memory_;
};

// A model's states on disk. Reads them ahead of updates and all-gathers, and writes them after an
// update. See Note [Memory of a file].
class DiskStates {
 public:
  DiskStates() = default; // call open()
  DiskStates(const DiskStates&) = delete;
  DiskStates& operator=(const DiskStates&) = delete;

  // Reserves the file. `name` is the name of this rank's states in errors. Throws std::system_error
  // if the disk is full.
  void open(
      const std::string& folder,
      const std::string& name,
      const Units& units,
      const UnitContext& context);
  // Returns the memory of a unit's part; zeros at first.
  c10::DataPtr memory(UnitId unit, Memory part) const;
  // Writes the unit to the file after Unit::materialize has filled it, and frees its memory.
  void store(UnitId unit) const;
  // Throws the error of a failed update, in every call, because its bytes are lost.
  void check() const;

  // -- updates: called from one thread. They throw as check() does.
  // Takes the units of the step, in the order of their updates.
  void begin_step(std::vector<UnitId> order);
  // Reads the unit, and starts a thread that reads the next one.
  void bring(UnitId unit);
  // Starts to write an updated unit, and frees the memory of the previous unit.
  void give_back(UnitId unit);
  // Completes all writes.
  void end_step();

  // -- all-gathers: called from another thread
  // Reads the unit's parameters, and starts a thread that reads the next unit in the direction of
  // the pass. Frees the memory of the previous unit, whose parameters are already copied. Stores an
  // error instead of throwing it, so that all ranks reach the all-gather.
  void load(UnitId unit);
  // Returns whether no load has failed: the parameters may then be read.
  bool is_loaded() const {
    return load_failure_ == nullptr;
  }
  // Returns and forgets the error of a load, or null.
  std::exception_ptr take_load_failure() {
    return std::exchange(load_failure_, nullptr);
  }

  // Leaks the read-ahead threads, which do not exist in the child of a fork.
  void mark_forked();

  int64_t file_nbytes() const {
    return layout_ ? layout_->file_nbytes() : 0;
  }
  int64_t buffers_nbytes() const {
    return layout_ ? layout_->buffers_nbytes() : 0;
  }

 private:
  template <typename Call>
  void run(const Call& call); // stores an error for check()
  void finish_write();
  void read_ahead(std::jthread& thread, const Range& range);
  const Range& parameters(UnitId unit) const {
    return layout_->units().at(unit).parts[Memory::Shard];
  }

  std::optional<DiskLayout> layout_;
  std::vector<std::string> labels_; // names of units in errors
  std::shared_ptr<FileMemory> file_;
  std::vector<UnitId> order_;
  std::vector<bool> brought_; // by unit
  UnitId written_ = -1; // the unit that is being written
  std::exception_ptr failure_;
  UnitId loaded_ = -1; // the unit that was loaded last
  std::exception_ptr load_failure_;
  // Threads, because MADV_WILLNEED reads only a few MiB, into small pages.
  std::jthread updates_ahead_, loads_ahead_; // last member: joined before the file is freed
};

} // namespace zerocore
