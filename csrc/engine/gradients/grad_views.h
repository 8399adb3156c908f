// Sets the parameters' `.grad`, and notices the user's changes to it.
//
// Note [Unused parameters]
// A parameter that no rank used gets no gradient, as on one device. If any rank used it, all ranks
// get its gradient. In every backward pass the ranks exchange a small message about the parameters
// that they used; it travels beside the last reductions. A rank waits for it only if it did not use
// a parameter that has no gradient yet, so models that use every parameter never wait.
//
// Note [Sums that were not reduced]
// A backward pass without sync reduces nothing, so a shard has no gradient yet. `.grad` is then
// another tensor (`sums`). At stage 1 it holds this rank's gradient of all elements. At stages 2
// and 3 it is only a mark: if zero_grad() removes it, the unit drops its unreduced gradients. At
// stage 0 the gradient itself holds this rank's values. By rows `.grad` stays None, as with FSDP2.
//
// Note [Gradients that programs keep]
// A whole parameter's gradient is a plain tensor. A program may keep it, or any tensor over its
// memory, while the next backward writes new values. So programs see a tensor over the kept
// gradients with a storage of its own. When a program drops or replaces `.grad` and still holds
// that storage, the storage gets a copy of the values.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "engine/unit/unit.h"
#include "plan/reduction.h"

namespace zerocore {

// Returns the gradient that autograd has accumulated for the parameter in this backward. Undefined
// if there is none, or if a reduction has packed it.
const at::Tensor& own_gradient(const UnitParam& param);
// Move the `grad` of a whole parameter that programs see to the shard, and back.
void move_seen_grad(UnitParam& param);
void return_seen_grad(UnitParam& param);

class GradViews {
 public:
  GradViews(const Units& units, const UnitContext& context, Reduction& reduction);

  // Takes the tensor that becomes `shard.grad`, a view of the parameter's kept gradient.
  void bind(UnitId unit, int param, at::Tensor grad) {
    params_.at(unit).at(param).grad = std::move(grad);
  }
  const at::Tensor& grad(UnitId unit, int param) const {
    return params_[unit][param].grad;
  }
  // Takes the tensor that is `shard.grad` after a backward without sync; if undefined, bind()'s is.
  void bind_sums(UnitId unit, int param, at::Tensor sums) {
    params_.at(unit).at(param).sums = std::move(sums);
  }
  // Returns true after a backward without sync: `shard.grad` may then be a tensor of bind_sums().
  bool shows_sums() const {
    return std::ranges::any_of(alone_, std::identity());
  }

  // Notices which gradients of the unit the user has dropped, kept or replaced since the last
  // backward.
  void take_changes(UnitId unit);
  // Copies the unit's gradients and clears them for this backward. Once per backward.
  void set_apart(UnitId unit);
  // With `adds`, adds the copies to this backward's gradients; else the copies replace them.
  void put_back(UnitId unit, bool adds);
  // Records which parameters of the unit have a gradient in this backward.
  void note_used(UnitId unit);
  // At the end of a backward that reduced a unit: sends the others the parameters that this rank
  // used, and receives theirs if needed. `reduced` is by unit.
  void tell_used();
  void hear_used(const std::vector<bool>& reduced);
  // Sets `.grad` of the unit, whose gradients were reduced in this backward or are held back.
  // `alone`: the backward was without sync.
  void show(UnitId unit, bool reduced, bool alone);
  // Sets `.grad` to the averages again after a backward with sync, if the unit has no sums.
  void show_averages(UnitId unit);
  // Returns whether a program has set the gradient of a whole parameter after a backward with sync.
  bool is_set(UnitId unit, int param) const;
  // Forgets which parameters a failed backward used.
  void forget_used();

 private:
  struct Param {
    at::Tensor grad;
    at::Tensor seen; // see Note [Gradients that programs keep]
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> window; // the storage of `seen`
    at::Tensor sums; // see Note [Sums that were not reduced]
    bool used = false; // a backward since the last reduction used the parameter
    at::Tensor apart; // the gradient from before this backward; see set_apart()
  };

  // Returns the tensor that becomes `shard.grad`.
  const at::Tensor& seen(UnitId unit, int param);
  static bool shows(const Param& param, const at::Tensor& current);
  static bool takes_values(const at::Tensor& current);
  void let_go(Param& param) const;
  bool lacks_any(const std::vector<bool>& reduced) const;

  const Units& units_;
  UnitContext context_;
  Reduction& reduction_;
  std::vector<std::vector<Param>> params_; // by unit and parameter
  std::vector<bool> apart_; // by unit: set_apart() was called
  std::vector<bool> alone_; // by unit: its last backward was without sync
};

} // namespace zerocore
