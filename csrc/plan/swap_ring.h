// Which units are in which buffers of host memory, and what moves between the buffers and a file;
// integers only.
//
// Note [Swapping]
// Every unit has a range of the file. A unit in use is held in a buffer; so are the next two, whose
// reads began earlier, and some that were used last, whose writes are under way. The order of
// units is announced beforehand: forward and back, or the order of steps. The unit that gives
// way is the one whose next use is farthest (Belady 1966). With three buffers one unit is read and
// one written while one is in use.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/types.h"

namespace zerocore {

// Read and Write begin a transfer between a buffer and its unit's range of the file. Await: the
// transfer of this buffer that was begun last is complete.
enum class SwapKind : uint8_t { Read, Write, Await };

struct SwapStep {
  SwapKind kind = SwapKind::Read;
  UnitId unit = -1;
  int buffer = -1;
};
using SwapSteps = std::vector<SwapStep>;

// The caller carries out the steps in their order. One thread at a time.
class SwapRing {
 public:
  // Bytes of each unit, at least one buffer. Ranges and buffers are of multiples of `alignment`.
  SwapRing(const std::vector<int64_t>& unit_nbytes, int num_buffers, int64_t alignment);

  int64_t file_nbytes() const;
  int64_t buffer_nbytes() const; // of each
  int num_buffers() const {
    return static_cast<int>(buffers_.size());
  }
  const Range& range(UnitId unit) const { // bytes of the file
    return ranges_.at(unit);
  }

  // The units that will be used from now on, each as often as it stands there; the first ones are
  // read. One that is used out of turn is served, but not read ahead.
  void expect(std::vector<UnitId> order, SwapSteps& steps);
  // The buffer that has the unit once the steps are carried out, until release(). Throws
  // c10::Error if all buffers are held, c10::ValueError if the unit is.
  int acquire(UnitId unit, SwapSteps& steps);
  // Writes what was changed, and reads ahead.
  void release(UnitId unit, bool changed, SwapSteps& steps);
  // The last transfer of the unit is complete.
  void settle(UnitId unit, SwapSteps& steps);
  // Nothing is under way afterwards, the file has all that was changed, and buffers have no unit.
  void finish(SwapSteps& steps);

 private:
  enum class Transfer : uint8_t { None, Reads, Writes };
  struct Buffer {
    UnitId unit = -1; // that it has, or will have; -1 for none
    bool held = false;
    Transfer transfer = Transfer::None; // begun and not awaited
    int64_t released = -1; // number of its last release
  };

  std::optional<int> buffer_of(UnitId unit) const;
  size_t next_use(UnitId unit) const;
  std::optional<int> find_room(std::optional<size_t> ahead) const;
  bool gives_way_before(const Buffer& one, const Buffer& other) const;
  void move(SwapKind kind, int index, SwapSteps& steps);
  void await(int index, SwapSteps& steps);
  void replace(int index, UnitId unit, SwapSteps& steps);
  void read_ahead(SwapSteps& steps);

  std::vector<Range> ranges_;
  std::vector<Buffer> buffers_;
  std::vector<UnitId> order_;
  size_t next_ = 0; // in the order
  int64_t num_releases_ = 0;
};

} // namespace zerocore
