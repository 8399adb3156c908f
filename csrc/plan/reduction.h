// Decides where gradients are packed, whether they add, and when they are reduced; integers only.
//
// The reducer carries out the steps with tensors, the planner with sizes: what the one does is what
// the other predicts. Each step is carried out before the next one is decided.
//
// Note [Where gradients live]
// stage 0, 1   packed into memory that stays, reduced in place. The gradient that the optimizer
//              sees is this rank's slice of it (stage 0: all of it).
// stage 2, 3   packed into a block of the pool, reduced into a shard that stays, the block given
//              back.
// While gradients accumulate without communication the full bucket holds this rank's own sums
// (`local`). Gradients are scaled by 1 / world size when they are packed.
//
// Note [Gradients on the wire]
// Where gradients travel in another type than they are kept in, they are packed (local sums: cast)
// into a block of the pool of that type, reduced there, and added to the gradient that is kept.
//
// Note [Replicas]
// With hybrid sharding the reduced shards are summed once more, over the ranks that hold the same
// one. On a device that runs on the stream of the reductions of a unit, right behind them. On the
// CPU it starts when the first sum is known, which is asked for when the next unit is reduced;
// where that sum is in its final place the second one is only waited for at the end of the
// backward.
//
// Where the optimizer's states are sharded over the replicas, too, the second collective is a
// reduce-scatter. Its result is added to the gradient before the next reduction.
//
// Note [Gradients on the host]
// Where a device keeps its gradients on the host, a reduction leaves its result in a block, which
// is copied from there. Without a collective it is the packed gradients themselves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/types.h"
#include "plan/pool_map.h"
#include "plan/reduction_facts.h"

namespace zerocore {

enum class GradStepKind : uint8_t {
  Keep, // `to` has memory that stays, from here on
  Take, // `to` is a block of the pool
  GiveBack, // `from` is none any more; it may be none already
  Pack, // the gradients of the backward go to `to`; see Reduction::added()
  Cast, // `from` goes to `to`
  Order, // collectives that start now read what was packed until now
  Start, // the collective of the ranks that share the state, from `from` to `to`
  StartAcross, // the collective over the replicas, of this rank's part of `from`, to `to`
  Wait, // for Start
  WaitAcross, // for StartAcross
  Zero, // the kept gradient of `param`, whose memory still holds an old value
  Sum, // the sum of the `parts` of `from` goes to this rank's part of `to`
  OffloadGrad, // `from` goes to the kept gradient on the host, see Note [Gradients on the host]
  GradReady, // the kept gradient is complete; the host may have it
};

struct GradStep {
  GradStepKind kind = GradStepKind::Keep;
  UnitId unit = -1;
  int region = 0;
  GradBuffer from = GradBuffer::Kept, to = GradBuffer::Kept;
  int64_t nbytes = 0; // of the block or of what is reduced
  int64_t parts = 1; // of a sum; of what the collective leaves for each element
  bool adds = false; // to what `to` holds
  int param = -1;
  TraceOp op = TraceOp::AllReduce;
  StreamRole last_use = StreamRole::Compute; // of a block that is given back
};

// The block of a Take or a GiveBack.
inline BlockKey block_of(const GradStep& step) {
  const GradBuffer place = step.kind == GradStepKind::Take ? step.to : step.from;
  const BlockUse use = place == GradBuffer::Full ? BlockUse::Gradients
      : place == GradBuffer::Wire                ? BlockUse::Wire
                                                 : BlockUse::Scratch;
  return {step.unit, use, step.region};
}

// Carries out steps.
class GradSteps {
 public:
  virtual void run(const GradStep& step) = 0;

 protected:
  ~GradSteps() = default;
};

class Reduction {
 public:
  // The units' layouts outlive it.
  Reduction(const ReductionOptions& options, std::vector<ReducedUnit> units);

  // Packs the unit's gradients and starts their reduction. Without sync they may only be summed on
  // this rank; false then.
  bool reduce(UnitId unit, bool sync, GradSteps& steps);
  // Ends a backward: completes everything.
  void finish(GradSteps& steps);
  // Forgets reductions and local sums. Gives back all blocks, whatever was carried out.
  void reset(GradSteps& steps);

  // Whether the region's parameters get gradients; at first as its layout says.
  void set_trainable(UnitId unit, int region, bool trainable) {
    units_.at(unit).regions.at(region).trainable = trainable;
  }
  // Whether the parameter's kept gradient holds a value.
  bool is_valid(UnitId unit, int param) const {
    return units_.at(unit).params.at(param).valid;
  }
  void set_valid(UnitId unit, int param, bool valid) {
    units_.at(unit).params.at(param).valid = valid;
  }
  // Forgets what is known of the parameter's gradient, sums of this rank included.
  void drop(UnitId unit, int param) {
    units_.at(unit).params.at(param) = {};
  }
  // During a Pack: the parameter's elements of the region that are added to; empty, at its
  // beginning, for none. The others are overwritten.
  Range added(const GradStep& pack, int param) const;
  // Whether this rank has sums of the unit that were not reduced.
  bool has_local(UnitId unit) const {
    return std::ranges::any_of(units_.at(unit).regions, &RegionState::local);
  }
  // Bytes of memory that stays.
  int64_t kept_nbytes(UnitId unit) const;

 private:
  struct RegionState {
    bool trainable = true;
    bool kept = false; // has memory that stays
    bool full = false, wire = false, scratch = false; // are blocks of the pool
    bool local = false; // the full bucket holds sums that were not reduced
    bool adds = false; // what is being reduced is added to the gradient
    bool across = false; // the host has a sum over the replicas to wait for
    GradBuffer result = GradBuffer::Kept; // of the reduction
  };
  struct ParamState {
    bool valid = false;
    bool local = false; // the local sums include this parameter
  };
  struct UnitState {
    std::vector<RegionState> regions;
    std::vector<ParamState> params;
  };
  using Key = RegionKey;

  RegionState& state_of(Key key) {
    return units_[key.first].regions[key.second];
  }
  bool completes_first(UnitId unit) const;
  bool any_valid(Key key) const;

  void pack(Key key, bool holds, GradSteps& steps);
  void issue(Key key, GradSteps& steps);
  void choose_result(Key key, GradSteps& steps);
  void complete_all(GradSteps& steps);
  void wait(Key key, GradSteps& steps);
  void complete(Key key, GradSteps& steps);
  void complete_across(Key key, GradSteps& steps);
  void start_across(UnitId unit, GradSteps& steps);
  void start_across(Key key, GradBuffer place, GradSteps& steps);
  void wait_across(Key key, GradSteps& steps);
  void grad_ready(Key key, GradSteps& steps);
  void sum_parts(Key key, GradBuffer to, GradSteps& steps);
  void zero_invalid(Key key, GradSteps& steps);
  void offload_grad(Key key, GradBuffer from, GradSteps& steps);
  void add_to_kept(Key key, GradBuffer from, int64_t parts, GradSteps& steps);
  void take(Key key, GradBuffer place, bool& held, GradSteps& steps);
  void give_back(Key key, GradBuffer place, bool& held, GradSteps& steps);

  ReductionFacts facts_;
  std::vector<UnitState> units_;
  std::vector<Key> in_flight_; // oldest first
};

} // namespace zerocore
