// One parameter of a unit: its tensors, and the versions that say what has changed it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/functional.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/layout.h"

namespace zerocore {

// Tensors that count what a program writes through their `.data`.
//
// Note [Writes through data]
// `.data` has a version counter of its own: autograd is not told of such writes, and a backward
// computes with the new values. All `.data` of a counted tensor share one counter, which the engine
// reads. Views of `.data` share it, too, and so does `.data` of a view: views share the version
// counter of their base, and by that its counter of writes through `.data` is found.

// A new leaf on the memory of `tensor`. It has its own version counter, and counts writes through
// its `.data`.
at::Tensor counted(const at::Tensor& tensor);
// A tensor with the shape and strides of `view` on the memory of `leaf`, a result of counted().
// Writes to it count as writes to `leaf`.
at::Tensor counted_view(const at::Tensor& leaf, const at::Tensor& view);
// The counter of writes through `tensor.data`. Not enabled if `tensor` is no result of counted().
c10::VariableVersion data_counter(const at::Tensor& tensor);
// Writes to `alias` count as those through the `.data` of `tensor`.
void count_as_data(const at::Tensor& tensor, const at::Tensor& alias);
// Writes to `alias`, the `.data` of a view of a result of counted(), count as those through its
// base's. Nothing if `view` is none.
void count_view_as_data(const at::Tensor& view, const at::Tensor& alias);

inline int64_t num_writes(const c10::VariableVersion& counter) {
  return counter.enabled() ? counter.current_version() : 0;
}

// One parameter of a unit, as tensors.

struct UnitParam {
  ParamSpec spec;
  std::vector<int64_t> strides; // of the full parameter; dense in some order of its dimensions
  at::Tensor full; // the leaf that forward and backward compute with
  at::Tensor shard; // the leaf that the optimizer sees: 1-D, or by rows a DTensor
  at::Tensor local; // by rows: the memory of that, with a shape
  c10::VariableVersion full_writes, shard_writes; // see Note [Writes through data]
  bool lacks_main = false; // frozen and cast: there is no main weight to train
  bool hooked = false; // the leaf reports its gradient
  bool trained = false; // requires_grad of both leaves, when they were last made to agree
  const c10::StorageImpl* home = nullptr; // where the shard's memory must stay
  const c10::StorageImpl* full_home = nullptr; // what the full one is gathered into
};

// The memory that is gathered and updated.
inline const at::Tensor& memory_of(const UnitParam& param) {
  return param.local.defined() ? param.local : param.shard;
}

inline std::vector<ParamSpec> specs_of(const std::vector<UnitParam>& params) {
  return c10::fmap(params, [](const UnitParam& param) { return param.spec; });
}

// A unit before it is made.
struct UnitSpec {
  std::string name;
  std::vector<UnitParam> params;
  bool stays = false; // unsharded from its forward to its backward
  bool near = true; // gathers again from near ranks, where there are some
  int mesh = 0; // of EngineOptions
};

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
