// Units in a file, of which some are in memory to be worked on. See Note [Memory of a file].
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "io/disk_file.h"
#include "plan/swap_ring.h"
#include "runtime/file_memory.h"

namespace zerocore {

struct SwapOptions {
  std::string folder; // where the file is
  std::string name; // of what is swapped, in errors
  std::vector<std::string> unit_names = {};
  std::vector<Range> ranges = {}; // bytes of each unit in the file, whole pages
  int64_t file_nbytes = 0;
  int num_buffers = 3; // units in memory, see Note [Swapping]
};

// One thread at a time. Units are zeros at first. Throws std::system_error when the disk fails,
// which names file and unit; from then on every call throws it again, for bytes are lost.
class SwappedUnits {
 public:
  explicit SwappedUnits(const SwapOptions& options);
  ~SwappedUnits() {
    file_.reset(); // ends its transfers while there is memory
  }

  // As SwapRing says; the reads are begun, not waited for.
  void expect(std::vector<UnitId> order);
  // The unit's bytes, which are in memory until release(), at the same place each time.
  char* acquire(UnitId unit);
  // A changed unit is on its way to the file afterwards.
  void release(UnitId unit, bool changed);
  // The released bytes of the unit are in the file.
  void settle(UnitId unit);
  // Everything is in the file, nothing in memory.
  void finish();
  // Throws what went wrong.
  void check() const;

  const std::shared_ptr<FileMemory>& memory() const { // of the whole file
    return memory_;
  }
  io::DiskFile& file() {
    return *file_;
  }
  const std::string& label(UnitId unit) const { // in errors
    return labels_.at(unit);
  }

 private:
  template <typename Plan> // that fills the steps to run
  void run(const Plan& plan);
  void begin(const SwapStep& step);
  void bring(UnitId unit, int buffer);
  void put_back(int buffer);

  SwapRing ring_;
  std::vector<Range> ranges_;
  std::vector<std::string> labels_; // of units
  std::vector<io::DiskFile::Ticket> tickets_; // of each buffer's last transfer
  std::vector<UnitId> brought_; // by buffer: which unit is in memory for it, -1 for none
  std::exception_ptr failure_;
  std::unique_ptr<io::DiskFile> file_;
  std::shared_ptr<FileMemory> memory_;
};

} // namespace zerocore
