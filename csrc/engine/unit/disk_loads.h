// Reads parameters from a file for gathers, the next unit's while this one is computed with.
//
// Which unit comes next is learned: the one that followed the same two last time. Nothing is read
// ahead from one pass to the next, as anybody may change parameters between them, nor while an
// update of the unit is under way.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "common/types.h"
#include "runtime/host_memory.h"
#include "runtime/swapped_units.h"

namespace zerocore {

// One thread at a time.
class DiskLoads {
 public:
  // Says which version of a unit the file has; none while that is about to change.
  using VersionOf = std::function<std::optional<int64_t>(UnitId)>;

  // `ranges`: bytes of each unit's parameters, of which `nbytes` are the most. `units`, whose file
  // it is, outlives it.
  DiskLoads(SwappedUnits& units, std::vector<Range> ranges, int64_t nbytes, VersionOf version_of)
      : units_(units),
        ranges_(std::move(ranges)),
        nbytes_(nbytes),
        version_of_(std::move(version_of)),
        memory_(HostMemory::map({nbytes * static_cast<int64_t>(buffers_.size())})) {}
  ~DiskLoads() {
    forget();
  }
  DiskLoads(const DiskLoads&) = delete;
  DiskLoads& operator=(const DiskLoads&) = delete;

  // Forgets what was read ahead.
  void forget();
  // Reads the unit's parameters, or waits until they are read, and begins with the next unit.
  // A failure is kept: the ranks go on to the gather together.
  void load(UnitId unit);
  // The bytes that load() has read in the place of `bytes`, which lie in the file's memory. Valid
  // until the load after the next one.
  at::Tensor loaded(const at::Tensor& bytes) const;
  // The error of a load since the last call, or null.
  std::exception_ptr take_failure() {
    return std::exchange(failure_, nullptr);
  }

 private:
  struct Buffer {
    UnitId unit = -1; // that it has, or will have
    std::optional<int64_t> version;
    std::optional<io::DiskFile::Ticket> ticket; // of the read that is under way
  };

  char* memory_of(size_t buffer) const {
    return memory_->data() + static_cast<int64_t>(buffer) * nbytes_;
  }
  bool has(size_t buffer, UnitId unit) const;
  void begin(size_t buffer, UnitId unit);
  void wait(size_t buffer);
  void read_ahead(UnitId unit);

  SwappedUnits& units_;
  std::vector<Range> ranges_;
  int64_t nbytes_;
  VersionOf version_of_;
  std::shared_ptr<HostMemory> memory_;
  std::array<Buffer, 2> buffers_;
  size_t current_ = 0; // the buffer that was loaded last
  UnitId before_ = -1, last_ = -1; // units that were loaded last
  std::map<std::pair<UnitId, UnitId>, UnitId> follows_; // by the two before it
  std::exception_ptr failure_;
};

} // namespace zerocore
