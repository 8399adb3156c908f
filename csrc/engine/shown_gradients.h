// Shows gradients in `.grad` of the parameters, and finds out what the user did to them.
//
// Note [Unused parameters]
// A parameter that no rank used keeps no gradient, as it would on one device; one that some rank
// used has a gradient on all. Which is which takes one small all-reduce. It is done in the first
// backward, and after that only if some rank left a parameter unused then (or if asked for):
// models that use everything never pay for it.
//
// Note [Sums that were not reduced]
// At stages 2 and 3 sums of this rank only are no gradient yet. `.grad` then holds a mark, zero, by
// which zero_grad() drops the sums. By rows it is as with FSDP2: nothing is shown, and the sums
// stay.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "engine/gradient_memory.h"
#include "engine/unit.h"
#include "plan/reduction.h"

namespace zerocore {

// A gradient's memory and the version of its values; equal ones have not been changed in place.
struct GradientVersion {
  const void* data = nullptr;
  uint32_t version = 0;

  static GradientVersion of(const at::Tensor& grad);
  bool operator==(const GradientVersion& other) const = default;
};

class ShownGradients {
 public:
  // `agree_on_used`: the ranks ask each other in every backward which parameters took part.
  ShownGradients(
      const std::vector<std::unique_ptr<Unit>>& units,
      const UnitContext& context,
      Reduction& reduction,
      bool agree_on_used);

  // The tensor that becomes `shard.grad`, over the parameter's kept gradient.
  void bind(UnitId unit, int param, at::Tensor grad) {
    params_.at(unit).at(param).grad = std::move(grad);
  }
  const at::Tensor& grad(UnitId unit, int param) const {
    return params_[unit][param].grad;
  }

  // Takes over what the user did to the unit's gradients since the last backward: dropped, kept,
  // replaced. `memory` by region.
  void take_changes(UnitId unit, std::vector<GradientMemory>& memory);
  // Remembers which of the unit's parameters have got a gradient in this backward.
  void note_used(UnitId unit);
  // At the end of a backward that reduced some unit; flags by unit. Asks the other ranks, if need
  // be, what they used.
  void agree(const std::vector<bool>& reduced);
  // Shows the unit's gradients, which were reduced in this backward or are held back.
  void show(UnitId unit, bool reduced);
  // Forgets which parameters took part, as the backward has failed.
  void forget_used();

 private:
  struct Param {
    at::Tensor grad;
    bool used = false; // took part in a backward since the last reduction
  };

  const std::vector<std::unique_ptr<Unit>>& units_;
  UnitContext context_;
  Reduction& reduction_;
  bool agree_on_used_;
  bool has_agreed_ = false;
  std::vector<std::vector<Param>> params_; // by unit and parameter
};

} // namespace zerocore
