// Where the bytes of units lie in a mapped file, and how much memory it takes to use them; integers
// only. See Note [Memory of a file].
//
// The parts of a unit lie one after the other, each from a page on. An update reads and writes them
// from the first weight that is trained on; a gather reads the parameters alone.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "plan/state_parts.h"
#include "plan/unit_mesh.h"

namespace zerocore {

struct DiskUnit {
  ByMemory<Range> parts; // bytes of the file, empty for what is not on disk
  Range updated; // bytes of the file that an update reads and writes
};

class DiskLayout {
 public:
  // Units in memory at a time. One is read and one written while one is updated.
  static constexpr int kNumUpdated = 3;
  static constexpr int kNumLoaded = 2; // one is copied while the next is read

  // Of no unit yet.
  explicit DiskLayout(const Tiers& tiers) : tiers_(tiers) {}
  // The next unit.
  void add(const Layout& layout, const UnitMesh& mesh);

  const std::vector<DiskUnit>& units() const {
    return units_;
  }
  int64_t file_nbytes() const {
    return file_nbytes_;
  }
  // Memory that updates and loads take, at most.
  int64_t buffers_nbytes() const;

 private:
  Range take(int64_t nbytes);

  Tiers tiers_;
  std::vector<DiskUnit> units_;
  int64_t file_nbytes_ = 0;
};

} // namespace zerocore
