// Shows gradients in `.grad` of the parameters, and finds out what the user did to them.
//
// Note [Unused parameters]
// A parameter that no rank used keeps no gradient, as it would on one device; one that some rank
// used has a gradient on all. In every backward the ranks tell each other what they used, in one
// small message that travels beside the last reductions. A rank waits for it only if it left out a
// parameter that has no gradient yet: models that use everything never wait.
//
// Note [Sums that were not reduced]
// A backward without sync reduces nothing, so a shard has no gradient yet. `.grad` is then another
// tensor (`sums`). At stage 1 it holds this rank's gradient of all elements. At stages 2 and 3 it
// is a mark: when zero_grad() removes it, the unit drops the gradients that it holds back. At stage
// 0 the gradient itself holds this rank's values. By rows nothing is shown, as with FSDP2.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "engine/unit/unit.h"
#include "plan/reduction.h"

namespace zerocore {

class GradViews {
 public:
  GradViews(const Units& units, const UnitContext& context, Reduction& reduction);

  // The tensor that becomes `shard.grad`, over the parameter's kept gradient.
  void bind(UnitId unit, int param, at::Tensor grad) {
    params_.at(unit).at(param).grad = std::move(grad);
  }
  const at::Tensor& grad(UnitId unit, int param) const {
    return params_[unit][param].grad;
  }
  // The tensor that is `shard.grad` after a backward without sync; none for the same one.
  void bind_sums(UnitId unit, int param, at::Tensor sums) {
    params_.at(unit).at(param).sums = std::move(sums);
  }
  // True after a backward without sync: `shard.grad` may then be a tensor of bind_sums().
  bool shows_sums() const {
    return std::ranges::any_of(alone_, std::identity());
  }

  // Takes over what the user did to the unit's gradients since the last backward: dropped, kept,
  // replaced.
  void take_changes(UnitId unit);
  // Takes copies of the unit's gradients out of the way of those of this backward; once in it.
  void set_apart(UnitId unit);
  // Adds them to the gradients of this backward, or drops these.
  void put_back(UnitId unit, bool adds);
  // Remembers which of the unit's parameters have got a gradient in this backward.
  void note_used(UnitId unit);
  // At the end of a backward that reduced some unit: tells the other ranks what this one used, and
  // then learns, if need be, what they did. Flags by unit.
  void tell_used();
  void hear_used(const std::vector<bool>& reduced);
  // Shows the unit's gradients, which were reduced in this backward or are held back. `alone`: of a
  // backward without sync.
  void show(UnitId unit, bool reduced, bool alone);
  // A backward with sync has ended, and no sums are left of the unit.
  void show_averages(UnitId unit);
  // Forgets which parameters took part, as the backward has failed.
  void forget_used();

 private:
  struct Param {
    at::Tensor grad;
    at::Tensor sums; // see Note [Sums that were not reduced]
    bool used = false; // took part in a backward since the last reduction
    at::Tensor apart; // the gradient from before this backward; see set_apart()
  };

  bool lacks_any(const std::vector<bool>& reduced) const;

  const Units& units_;
  UnitContext context_;
  Reduction& reduction_;
  std::vector<std::vector<Param>> params_; // by unit and parameter
  std::vector<bool> apart_; // units that have gradients apart
  std::vector<bool> alone_; // units whose last backward was without sync
};

} // namespace zerocore
