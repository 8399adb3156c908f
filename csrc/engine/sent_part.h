// This rank's part of a unit that was gathered before its forward began: is it still what the shard
// holds?
//
// Note [Weights that change after a step]
// What is gathered at an optimizer's step was sent before anybody could change it in a way that no
// counter shows (`p.data.clamp_()`, a NumPy view), or on one rank only. So what is sent is a copy
// of the shard, in this rank's part of the gathered unit, and it is compared with the shard when
// the forward uses it. To gather again is for all ranks to decide, and they would have to wait for
// each other at the begin of each forward; so a rank that finds a difference says so in its message
// at the end of the pass, and all refuse the pass. On a device nothing waits for the comparison
// before that.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "engine/unit_context.h"
#include "runtime/bucket.h"

namespace zerocore {

// Where a part differs from its shard: 8 bytes of a region of the layout.
struct ChangedWord {
  int region = 0;
  int64_t word = 0; // in the shard
};

class SentPart {
 public:
  // Both outlive it.
  SentPart(const UnitContext& context, const std::string& unit) : context_(context), unit_(unit) {}

  // The next gather is to be compared with what its shards hold later; others are not.
  void expect() {
    expected_ = true;
  }
  // A gather begins. Whether it is that one; then both buckets stay as they are until compare().
  bool begin(const Bucket& gathered, const Bucket& shards);
  // Copies a region of the shard to where the gather sends it from.
  void copy(int region) const;
  // From now on compare() is to compare: the forward begins.
  void arm() {
    armed_ = gathered_ != nullptr;
  }
  // The gather was waited for. Where the other ranks are not real, the shard's values are taken in
  // the place of those that were sent.
  void compare();
  // What compare() has found since the last call. On a device the host waits for it.
  std::optional<ChangedWord> take_changed();

 private:
  void take_anew() const;
  void compare_on_host();
  void compare_on_device();

  const UnitContext& context_;
  const std::string& unit_;
  bool expected_ = false;
  bool armed_ = false;
  const Bucket* gathered_ = nullptr; // null where there is nothing to compare
  const Bucket* shards_ = nullptr;
  // By region, int64, on the host: the first word that differs, or -1; as of `compared_`.
  at::Tensor words_;
  StreamEvent compared_;
};

} // namespace zerocore
