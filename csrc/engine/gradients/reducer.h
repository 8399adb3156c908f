// Reduces the units' gradients: from `.grad` of full parameters to `.grad` of shards. Carries out
// the steps of plan/reduction.h, whose notes explain them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/gradients/grad_views.h"
#include "engine/offload/offload.h"
#include "engine/unit/unit.h"
#include "kernels/ops.h"
#include "plan/reduction.h"
#include "plan/shard_options.h"

namespace zerocore {

// Packs the gradients of a region into a bucket, and scales them.
class GradientPacker {
 public:
  // Carries out a Pack into `bucket` (1-D, the region's elements) on the compute stream. Zeroes
  // gaps and parameters without a gradient, unless the step adds to them. Throws c10::ValueError
  // for a gradient that is sparse or has another dtype than the parameter.
  void pack(
      const Unit& unit,
      const Step& step,
      const Reduction& reduction,
      const at::Tensor& bucket);

 private:
  void add_params(const Unit& unit, const Step& step, const Reduction& reduction);
  void add_rows(const Unit& unit, const Step& step, const Reduction& reduction);
  void add_param(const UnitParam& param, const Range& place, const Range& added);
  void add_segment(const at::Tensor* source, int64_t start, const Range& range, bool add);

  std::vector<kernels::PackSegment> segments_; // reused
};

class Reducer final : private Steps {
 public:
  Reducer(
      const Units& units,
      const UnitContext& context,
      const ShardOptions& sharding,
      Offload& offload);

  // Returns a tensor over the parameter's gradient shard; the first gradient allocates its memory.
  // Undefined if the parameter's dtype is not floating point.
  at::Tensor make_grad(UnitId unit, int param) const;
  // Returns a tensor for `shard.grad` after a backward without sync. At stages 0 and 1 it has this
  // rank's sums of all elements, 1-D; at stages 2 and 3 it is the tensor of make_grad().
  at::Tensor make_sums(UnitId unit, int param) const;
  // Returns the object that sets `shard.grad` to these tensors.
  GradViews& views() {
    return views_;
  }
  // Returns whether the tensor of make_sums() holds this rank's sums.
  bool has_sums(UnitId unit, int param) const {
    return reduction_.shows_sums(unit, units_.at(unit)->layout().places().at(param).region);
  }

  // Packs the unit's gradients and starts their reduction. If the model or the unit does not sync,
  // stages 0 and 1 only sum them on this rank; so do stages 2 and 3 with hold_full. A parameter
  // without a gradient counts as zero.
  void reduce(UnitId unit);
  bool sync() const {
    return sync_;
  }
  void set_sync(bool sync) {
    sync_ = sync;
  }
  // While deferred, reduce() does nothing and gradients stay on the full parameters.
  void set_deferred(bool deferred) {
    deferred_ = deferred;
    if (deferred) {
      move_seen_grads();
    }
  }
  // Call it when a backward begins, see Note [Whole parameters].
  void move_seen_grads();
  // Copies gradients that programs keep to memory of their own, see Note [Gradients that programs
  // keep].
  void release_kept();
  bool deferred() const {
    return deferred_;
  }
  // Returns whether full parameters of the unit have gradients that reduce() has not packed.
  bool has_grads(UnitId unit) const;
  // Returns whether the unit has unreduced gradients or local sums.
  bool holds_back(UnitId unit) const;
  // Returns whether full parameters have gradients that this backward does not reduce, and whose
  // local sums have another dtype.
  bool has_more_to_sum(UnitId unit) const;
  // Returns whether this backward syncs and the unit has local sums of an earlier one.
  bool has_earlier_sums(UnitId unit) const;
  bool holds_back_any() const;
  // Ends a backward: waits for its reductions and sets `.grad` of the shards. Returns by unit
  // whether its gradients were reduced.
  std::vector<bool> finish();
  // Waits for pending reductions, and drops their results and all unreduced gradients.
  void reset();
  // Returns the unit's gradient memory on the device, as bytes.
  std::vector<at::Tensor> device_memory(UnitId unit) const;
  // Returns the bytes of gradients that persist between steps.
  int64_t persistent_nbytes() const;

 private:
  // Carries out steps that pack or offload gradients; the unit's StepRunner carries out the others.
  void run(const Step& step) override;
  bool move(const Step& step, UnitMemory& memory);
  void note_trainable(UnitId unit);
  void touch(UnitId unit);
  void clear_full_grads(UnitId unit);
  void return_seen_grads();
  void after_reduce(UnitId unit);
  void forget_backward();
  void note_use(UnitId unit) const;

  const Units& units_;
  UnitContext context_;
  Offload& offload_;
  Reduction reduction_;
  GradViews views_;
  GradientPacker packer_;
  bool sync_ = true; // reductions communicate
  bool deferred_ = false;
  std::vector<bool> touched_, reduced_; // by unit, in this backward
};

} // namespace zerocore
