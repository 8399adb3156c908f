// Units in a file, of which some are in buffers of host memory.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "io/disk_file.h"
#include "plan/swap_ring.h"
#include "runtime/host_memory.h"

namespace zerocore {

struct SwapOptions {
  std::string folder; // where the file is
  std::string name; // of what is swapped, in errors
  std::vector<std::string> unit_names;
  std::vector<int64_t> unit_nbytes;
  int num_buffers = 3; // see Note [Swapping]
  io::DiskWay way = io::DiskWay::Any;
};

// One thread at a time. Units are zeros at first. Throws std::system_error when the disk fails,
// which names file and unit; from then on every call throws it again, for bytes are lost.
class SwappedUnits {
 public:
  explicit SwappedUnits(const SwapOptions& options);

  // As SwapRing says; the reads are begun, not waited for.
  void expect(std::vector<UnitId> order);
  // The unit's bytes, from a page on, until release().
  char* acquire(UnitId unit);
  // A changed unit is on its way to the file afterwards.
  void release(UnitId unit, bool changed);
  // Everything is in the file.
  void finish();

  const std::shared_ptr<HostMemory>& memory() const { // of the buffers
    return memory_;
  }
  const io::DiskFile& file() const {
    return *file_;
  }

 private:
  void check() const;
  void run(const SwapSteps& steps);
  void begin(const SwapStep& step);

  SwapRing ring_;
  std::vector<std::string> labels_; // of units
  std::shared_ptr<HostMemory> memory_;
  std::vector<io::DiskFile::Ticket> tickets_; // of each buffer's last transfer
  std::exception_ptr failure_;
  std::unique_ptr<io::DiskFile> file_; // last: ends its transfers while there is memory
};

} // namespace zerocore
