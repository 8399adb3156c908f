// Counts the changes of a unit's parameters, and tells autograd of them.
//
// A version is a number that only grows: what a shard's version counter shows, and the changes that
// it does not show, together.
//
// Note [Changes between a forward and its backward]
// Graphs hold the full parameters, so autograd sees what a forward changes in them. Of changes to
// shards it is told through the version counters of the full ones, unless they were made through
// `.data`. A backward is then refused, or not, as on one device: it is if it has saved a tensor
// that has changed since.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/unit/unit_param.h"
#include "plan/layout.h"

namespace zerocore {

class ParamVersions {
 public:
  // Both outlive it and stay where they are.
  ParamVersions(const std::vector<UnitParam>& params, const Layout& layout)
      : params_(params),
        layout_(layout),
        changes_(params.size(), 0),
        written_(params.size(), 0),
        full_versions_(params.size(), 0),
        told_(params.size(), 0),
        updated_(params.size(), false) {}

  // Changes whenever the optimizer or the user changed a shard: of all, or of those in a region.
  int64_t of_unit() const;
  int64_t of_region(int region) const;
  int64_t of_param(size_t param) const;
  // The same of all, without changes that were made to the unsharded parameters.
  int64_t of_shards() const;

  // For changes that no version counter shows (`.data`): of any parameters, or, by an optimizer, of
  // those that require grad or of those named.
  void mark_changed();
  void mark_updated(const std::optional<std::vector<int>>& params);
  // Whether optimizers have updated all parameters that require grad, and there are some; since the
  // last forget_updates().
  bool are_all_updated() const;
  void forget_updates() {
    std::fill(updated_.begin(), updated_.end(), false);
  }

  // See Note [Changes between a forward and its backward]. True if a parameter that requires grad
  // has changed since the last call.
  bool tell_autograd();

  // The unsharded parameters that were written to since the last take_writes().
  std::vector<int> written() const;
  // The same, and starts over. They count as changed if the shards are to keep it.
  std::vector<int> take_writes(bool keeps);
  // As mark_changed, for writes to unsharded parameters that no version counter shows.
  void mark_written();
  void mark_written(size_t param);

 private:
  // The part of a parameter's version that autograd is told of.
  int64_t told_of(size_t param) const;

  const std::vector<UnitParam>& params_;
  const Layout& layout_;
  std::vector<int64_t> changes_; // of each parameter, beside those its version counter shows
  std::vector<int64_t> written_; // changes of the unsharded parameters, which the shards keep
  std::vector<int64_t> full_versions_; // of the unsharded parameters
  std::vector<int64_t> told_; // versions that autograd knows of
  std::vector<bool> updated_; // by optimizers
};

} // namespace zerocore
