// Packs, reduces and accumulates gradients; decides nothing about order.
//
// Note [Where gradients live]
// stage 0, 1   one persistent bucket per region: packed into, reduced in place. The gradient the
//              optimizer sees is this rank's slice of it (stage 0: all of it).
// stage 2, 3   packed into a pool slot, reduced into a persistent shard, the slot given back.
// While gradients accumulate without communication the bucket holds this rank's own sums
// (`local`). Gradients are scaled by 1 / world size when they are packed.
//
// Note [Replicas]
// With hybrid sharding the reduced shards are summed once more, over the ranks that hold the same
// one. On a device that runs on the stream of the reduction, right behind it. On the CPU it starts
// when the first sum is known, which is asked for when the next unit is reduced; where that sum is
// in its final place the second one is only waited for at the end of the backward.
//
// Note [Gradients on the wire]
// Where gradients travel in another type than they are kept in, they are packed (local sums: cast)
// into a slot of the pool of that type, reduced there, and added to the gradient that is kept.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "engine/unit.h"
#include "kernels/ops.h"

namespace zerocore {

struct ReducerOptions {
  bool hold_full = false; // stages 2, 3: keep full sums while not syncing
  bool exchange_used = false; // ask the ranks in every backward which parameters took part
};

class Reducer {
 public:
  Reducer(std::vector<std::unique_ptr<Unit>>& units, UnitContext context, ReducerOptions options);

  // A tensor over the memory of a parameter's gradient shard, 1-D; memory comes with the first
  // gradient.
  at::Tensor make_grad(UnitId unit, int param) const;
  // The tensor that becomes `shard.grad`; same memory as make_grad.
  void bind_grad(UnitId unit, int param, at::Tensor grad);

  // Packs the unit's gradients and, with sync, starts their reduction; otherwise they are summed
  // locally (stages 0, 1, hold_full). Parameters without gradient count as zero.
  void reduce(UnitId unit, bool sync);
  // Whether the unit has gradients that reduce() has not seen.
  bool has_grads(UnitId unit) const;
  // Units whose gradients were reduced in this backward, one flag each.
  std::vector<bool> reduced() const;
  // Ends a backward: waits for the reductions and shows the gradients on the shards.
  void finish();
  // Waits for what is in flight and drops it, and all gradients not reduced yet.
  void reset();
  // Bytes of gradient memory that stay between steps.
  int64_t persistent_nbytes() const;

 private:
  struct RegionGrads {
    explicit RegionGrads(const Unit& unit, int region, bool exchanges);

    int region = 0;
    Bucket full; // packed gradients of this rank
    std::optional<Bucket> shard; // reduced; only where gradients are sharded
    std::optional<Bucket> wire; // gradients as they travel
    Bucket scratch; // what the other ranks sent, or a sum to be added
    Slot full_slot, wire_slot, scratch_slot;
    bool local = false; // `full` holds sums that were not reduced
    bool adds = false; // what is being reduced is added to the gradient
    PendingCollective pending;
    PendingCollective across; // of the sum over the replicas
  };
  struct ParamGrads {
    at::Tensor grad;
    bool valid = false; // the gradient memory holds a value
    bool local = false; // the bucket's unreduced sums include this parameter
    bool used = false; // took part in a backward since the last reduction
  };
  struct UnitGrads {
    std::vector<RegionGrads> regions; // floating-point ones
    std::vector<ParamGrads> params;
    bool touched = false; // in this backward
    bool reduced = false; // in this backward
  };

  bool persistent() const {
    return !context_.policy.shards_gradients();
  }
  bool uses_slots(UnitId unit) const;
  bool sums_on_host() const;
  bool is_trainable(const Unit& unit, int region) const;
  void touch(UnitId unit);
  void attach(UnitId unit, RegionGrads& grads, bool hold);
  void attach_full(UnitId unit, RegionGrads& grads);
  c10::DataPtr zeroed_memory(int64_t nbytes) const;
  void pack(UnitId unit, RegionGrads& grads, bool hold);
  void put_on_wire(UnitId unit, RegionGrads& grads);
  void add_segments(UnitId unit, const RegionGrads& grads, int param, bool to_wire);
  void add_segment(const at::Tensor* source, int64_t start, Range range, bool add);
  void check_gradient(const UnitParam& param) const;
  double scale() const;
  Range add_range(const Unit& unit, const RegionGrads& grads, int param) const;
  bool any_valid(UnitId unit, const RegionGrads& grads) const;
  void issue(UnitId unit, RegionGrads& grads);
  PendingCollective start(UnitId unit, RegionGrads& grads);
  void complete(UnitId unit, RegionGrads& grads);
  PendingCollective start_across(UnitId unit, const at::Tensor& sum);
  void sum_across(UnitId unit, RegionGrads& grads);
  void wait_across();
  void sum(UnitId unit, const at::Tensor& out, const at::Tensor& chunks, bool add);
  void take_result(UnitId unit, RegionGrads& grads);
  const at::Tensor& result_of(const RegionGrads& grads) const;
  void release_slots(RegionGrads& grads);
  void complete_all();
  void zero_invalid(UnitId unit, const RegionGrads& grads);
  void clear_full_grads(UnitId unit);
  void exchange_used();
  void show(UnitId unit);
  void note_use(UnitId unit) const;
  const at::Tensor& shard_of(const RegionGrads& grads) const;

  std::vector<std::unique_ptr<Unit>>& units_;
  UnitContext context_;
  ReducerOptions options_;
  bool asked_used_ = false;
  std::vector<UnitGrads> grads_;
  std::vector<std::pair<UnitId, int>> in_flight_; // (unit, index into regions)
  std::vector<kernels::PackSegment> segments_; // reused
};

} // namespace zerocore
