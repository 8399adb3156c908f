// Reductions of the units' gradients: what parameters have goes in, what their shards show comes
// out. See the notes in plan/reduction.h, which decides the steps.
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

// Packs the gradients of a region into a bucket, scaled, each in its place.
class GradientPacker {
 public:
  // Carries out a Pack, scaled, into `bucket` (1-D, the region's elements, on the compute stream).
  // Gaps and parameters without gradient are zeroed where nothing is to be added to. Throws
  // c10::ValueError for a sparse gradient, or one of another dtype than its parameter.
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

  // A tensor over the memory of a parameter's gradient shard, 1-D; memory comes with the first
  // gradient. Undefined where there is no gradient.
  at::Tensor make_grad(UnitId unit, int param) const;
  // A tensor for the parameter's `grad` after a backward without sync: at stages 0 and 1 over this
  // rank's sums of all elements, 1-D; else the same as make_grad.
  at::Tensor make_sums(UnitId unit, int param) const;
  // The tensors of both, as `shard.grad` shows them.
  GradViews& views() {
    return views_;
  }
  // Whether the tensor of make_sums() has this rank's sums.
  bool has_sums(UnitId unit, int param) const {
    return reduction_.shows_sums(unit, units_.at(unit)->layout().places().at(param).region);
  }

  // Packs the unit's gradients and starts their reduction. Without sync, of the model or in the
  // unit's settings, it sums them locally (stages 0, 1, or where full sums are held). Parameters
  // without gradient count as zero.
  void reduce(UnitId unit);
  bool sync() const {
    return sync_;
  }
  void set_sync(bool sync) {
    sync_ = sync;
  }
  // Until it is false again, gradients stay where the backward has left them: reduce() does
  // nothing.
  void set_deferred(bool deferred) {
    deferred_ = deferred;
  }
  bool deferred() const {
    return deferred_;
  }
  // Whether the unit has gradients that reduce() has not seen; or has not reduced.
  bool has_grads(UnitId unit) const;
  bool holds_back(UnitId unit) const;
  // Whether the unit has sums that a backward before this one, which syncs, has left.
  bool has_late_sums(UnitId unit) const;
  bool holds_back_any() const;
  // Ends a backward: waits for the reductions and shows the gradients on the shards. Returns the
  // units whose gradients were reduced in it, one flag each.
  std::vector<bool> finish();
  // Waits for what is in flight and drops it, and all gradients not reduced yet.
  void reset();
  // Gradients of a unit that stay on the device, as bytes.
  std::vector<at::Tensor> device_memory(UnitId unit) const;
  // Bytes of gradient memory that stay between steps.
  int64_t persistent_nbytes() const;

 private:
  // Carries out steps that need more than the unit's memory, and hands the unit the others.
  void run(const Step& step) override;
  bool move(const Step& step, UnitMemory& memory);
  void note_trainable(UnitId unit);
  void touch(UnitId unit);
  void clear_full_grads(UnitId unit);
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
  std::vector<bool> touched_, reduced_; // units, in this backward
};

} // namespace zerocore
