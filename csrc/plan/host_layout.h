// Where the parts of units lie in one mapping of the host's memory; integers only.
//
// Memory that is copied to and from a device comes first, unit after unit, so that it can be pinned
// by itself, and behind it two buffers where gradients come off a device, see Note [Gradients of a
// device on the host]; then, from a page on, the moments, which take memory once an optimizer
// touches them. Each part begins where a region may begin.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "plan/state_parts.h"
#include "plan/unit_mesh.h"

namespace zerocore {

class HostLayout {
 public:
  // Of no unit yet. `lands`: gradients that are kept come off a device.
  HostLayout(const Tiers& tiers, bool lands) : tiers_(tiers), lands_(lands) {}
  // The next unit.
  void add(const Layout& layout, const UnitMesh& mesh);

  // Bytes of the mapping; empty for what is not on the host. Of all units that will be added.
  Range part(UnitId unit, Memory which) const;
  // The gradient of a region that is trained.
  Range gradient(UnitId unit, int region) const;

  // One of the two in which gradients come that are added to others; empty where none come.
  Range landing_buffer(int index) const;

  int64_t nbytes() const {
    return moments_begin() + moments_nbytes_;
  }
  // The first so many are copied to and from a device.
  int64_t copied_nbytes() const {
    return landing_buffer(1).end;
  }
  // Of main weights, these as layers compute with them and parameters; and of gradients.
  int64_t weights_nbytes() const {
    return weights_nbytes_;
  }
  int64_t gradients_nbytes() const {
    return gradients_nbytes_;
  }
  // All that is neither of these nor an element of a moment.
  int64_t gaps_nbytes() const {
    return nbytes() - weights_nbytes_ - gradients_nbytes_ - moment_elements_nbytes_;
  }

 private:
  struct HostUnit {
    ByMemory<Range> parts; // moments from the begin of all moments on
    std::vector<Range> gradients; // by region
  };

  int64_t moments_begin() const;
  void add_gradients(const Layout& layout, HostUnit& unit);
  int64_t moment_elements(const Layout& layout, int64_t shard) const;

  Tiers tiers_;
  bool lands_;
  std::vector<HostUnit> units_;
  int64_t parts_nbytes_ = 0, moments_nbytes_ = 0, landing_nbytes_ = 0;
  int64_t weights_nbytes_ = 0, gradients_nbytes_ = 0, moment_elements_nbytes_ = 0;
};

} // namespace zerocore
