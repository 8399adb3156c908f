// One parameter of a unit: its tensors, and versions that grow when it changes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/functional.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plan/layout.h"

namespace zerocore {

// Note [Writes through data]
// In torch `.data` has a version counter of its own: autograd does not see writes through it, and a
// backward pass computes with the new values. The engine must see such writes. So all `.data`
// tensors of a counted tensor, and their views, share one more counter, the data counter. The
// `.data` of a view finds it by the version counter that the view shares with its base.

// Returns a new leaf over the memory of `tensor`, with a version counter and a data counter.
at::Tensor counted(const at::Tensor& tensor);
// Returns a tensor with the shape and strides of `view` over the memory of `leaf`, a result of
// counted(). It shares both counters of `leaf`.
at::Tensor counted_view(const at::Tensor& leaf, const at::Tensor& view);
// Returns the data counter, which is not enabled if `tensor` is not a counted tensor.
c10::VariableVersion data_counter(const at::Tensor& tensor);
// Makes writes to `alias` count in the data counter of `tensor`.
void count_as_data(const at::Tensor& tensor, const at::Tensor& alias);
// Makes writes to `alias`, the `.data` of `view`, count in the data counter of the view's base.
// Does nothing if `view` is not a view of a counted tensor.
void count_view_as_data(const at::Tensor& view, const at::Tensor& alias);

inline int64_t num_writes(const c10::VariableVersion& counter) {
  return counter.enabled() ? counter.current_version() : 0;
}

// Note [Whole parameters]
// At stage 0 without main weights or offload, programs hold the full parameter itself, as under
// DistributedDataParallel: nothing is exchanged, and only the engine sees the shard. Autograd
// accumulates into `full.grad`, and programs read it. When the first gradient of a backward
// arrives, the gradient that programs see moves to `shard.grad`, where the reducer expects it. The
// programs' post-accumulate-grad hooks move with it, because they wait for the average. After the
// backward both move back. If a program sets `data`, the parameter lies in that memory from then
// on, and the shard follows it.

// One parameter of a unit, as tensors.
struct UnitParam {
  ParamSpec spec;
  std::vector<int64_t> strides; // of the full parameter; dense in some order of its dimensions
  at::Tensor full; // the leaf that forward and backward compute with
  at::Tensor shard; // the leaf that the optimizer sees: 1-D, or by rows a DTensor
  at::Tensor local; // by rows: the DTensor's local tensor
  c10::VariableVersion full_writes, shard_writes; // data counters, see Note [Writes through data]
  bool is_whole = false; // see Note [Whole parameters]
  bool moved_grad = false; // whole: the programs' `full.grad` is in `shard.grad`
  std::shared_ptr<void> node = {}; // accumulates gradients of `full`, and reports them
  bool lacks_main = false; // frozen and cast: it has no main weight to train
  bool trained = false; // requires_grad of both leaves when they last agreed
  const c10::StorageImpl* home = nullptr; // the storage that the shard must keep
  const c10::StorageImpl* full_home = nullptr; // the storage that the full parameter must keep
};

// Returns the leaf that programs see between calls.
inline const at::Tensor& seen_leaf(const UnitParam& param) {
  return param.is_whole ? param.full : param.shard;
}

// Returns the shard's memory, which all-gathers send.
inline const at::Tensor& memory_of(const UnitParam& param) {
  return param.local.defined() ? param.local : param.shard;
}

inline std::vector<ParamSpec> specs_of(const std::vector<UnitParam>& params) {
  return c10::fmap(params, [](const UnitParam& param) { return param.spec; });
}

// The parameters and options of a unit to make.
struct UnitSpec {
  std::string name;
  std::vector<UnitParam> params;
  bool stays = false; // unsharded from its forward to its backward
  bool near = true; // later gathers come from near ranks, if the mesh has any
  int mesh = 0; // number of its mesh in EngineOptions
};

// Note [Changes between a forward and its backward]
// Graphs hold the full parameters, so autograd sees changes of these. When a shard changes, the
// engine bumps the version counter of the full parameter, unless the change came through `.data`.
// Autograd then refuses a backward pass exactly as on one device: if a tensor that it has saved has
// changed since.

// Counts the changes of a unit's parameters, and reports them to autograd. A version only grows: it
// is the shard's version counter plus the changes that this counter misses.
class ParamVersions {
 public:
  // Both arguments must outlive the object and keep their addresses.
  ParamVersions(const std::vector<UnitParam>& params, const Layout& layout)
      : params_(params),
        layout_(layout),
        changes_(params.size(), 0),
        written_(params.size(), 0),
        full_versions_(params.size(), 0),
        told_(params.size(), 0),
        updated_(params.size(), false) {}

  // Return the version of all parameters, of a region, or of one parameter. It grows whenever the
  // optimizer or the user changes a shard.
  int64_t of_unit() const;
  int64_t of_region(int region) const;
  int64_t of_param(size_t param) const;
  // Returns the version of all parameters, without changes of full parameters.
  int64_t of_shards() const;

  // Count changes that no version counter shows: of all parameters, or an optimizer's update of
  // `params` (nullopt: of all that require grad).
  void mark_changed();
  void mark_updated(const std::optional<std::vector<int>>& params);
  // Returns whether optimizers have updated all parameters that require grad since the last
  // forget_updates(). False if none was updated.
  bool are_all_updated() const;
  void forget_updates() {
    std::fill(updated_.begin(), updated_.end(), false);
  }

  // See Note [Changes between a forward and its backward]. Returns whether a parameter that
  // requires grad has changed since the last call.
  bool tell_autograd();

  // Returns the full parameters that were written since the last take_writes().
  std::vector<int> written() const;
  // written(), and starts over. With `keeps` the shards take the writes, which count as changes.
  std::vector<int> take_writes(bool keeps);
  // Count writes to full parameters that no version counter shows.
  void mark_written();
  void mark_written(size_t param);

 private:
  void mark_changed(size_t param);
  // Returns the part of a parameter's version that is reported to autograd.
  int64_t told_of(size_t param) const;

  const std::vector<UnitParam>& params_;
  const Layout& layout_;
  // By parameter:
  std::vector<int64_t> changes_; // changes that the version counter misses
  std::vector<int64_t> written_; // writes to the full parameter that the shard takes
  std::vector<int64_t> full_versions_; // writes to the full parameter at the last take_writes()
  std::vector<int64_t> told_; // the version that autograd knows
  std::vector<bool> updated_; // optimizers have updated it since forget_updates()
};

} // namespace zerocore
