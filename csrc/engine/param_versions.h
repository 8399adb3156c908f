// Counts the changes of a unit's parameters, and remembers which version had which.
//
// A version is a number that only grows: what a shard's version counter shows, and the changes that
// it does not show, together.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/unit_param.h"
#include "plan/layout.h"

namespace zerocore {

class ParamVersions {
 public:
  // Both outlive it and stay where they are.
  ParamVersions(const std::vector<UnitParam>& params, const Layout& layout)
      : params_(params), layout_(layout), changes_(params.size(), 0) {}

  // Changes whenever the optimizer or the user changed a shard: of all, or of those in a region.
  int64_t of_unit() const;
  int64_t of_region(int region) const;

  // For changes that no version counter shows (`.data`): of any parameters, or, by an optimizer, of
  // those that require grad or of those named.
  void mark_changed();
  void mark_updated();
  void mark_updated(const std::vector<int>& params);

  // Remembers the parameters' versions as those of the unit's version now.
  void remember();
  // Parameters that have changed since the unit had that version; null if it is too long ago.
  std::optional<std::vector<int>> changed_since(int64_t version) const;

  // Whether somebody wrote to the unsharded parameters since the last call.
  bool take_writes();

 private:
  struct Snapshot {
    int64_t unit = -1;
    std::vector<int64_t> params;
  };

  int64_t of_param(size_t param) const;

  const std::vector<UnitParam>& params_;
  const Layout& layout_;
  std::vector<int64_t> changes_; // of each parameter, beside those its version counter shows
  int64_t full_version_ = 0; // of all unsharded parameters
  std::array<Snapshot, 4> snapshots_; // of the last versions that were remembered
  size_t next_snapshot_ = 0;
};

} // namespace zerocore
