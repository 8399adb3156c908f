// The steps of a reduction of gradients; see plan/reduction.h for what they mean.
#pragma once

#include <cstdint>

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
  StartAcross, // the collective over `axis` of this rank's part of `from`, to `to`
  Wait, // for Start
  WaitAcross, // for StartAcross
  Zero, // the kept gradient of `param`, whose memory still holds an old value
  Sum, // the sum of the `parts` of `from` goes to what this rank sums of `to`
  OffloadGrad, // `from` goes to the kept gradient on the host, see Note [Gradients on the host]
  GradReady, // the kept gradient is complete; the host may have it
};

// Of a unit's gradient scale, see Note [Scale of gradients].
enum class ScalePart : uint8_t { None, All, Packed, Rest, RestUndone };

struct GradStep {
  GradStepKind kind = GradStepKind::Keep;
  UnitId unit = -1;
  int region = 0;
  Memory from = Memory::Kept, to = Memory::Kept;
  int64_t nbytes = 0; // of the block or of what is reduced
  int64_t parts = 1; // of a sum; of what the collective leaves for each element
  bool adds = false; // to what `to` holds
  int param = -1;
  TraceOp op = TraceOp::AllReduce;
  AxisName axis = AxisName::Replicas; // of a StartAcross
  ScalePart scale = ScalePart::None; // of what is written
  StreamRole last_use = StreamRole::Compute; // of a block that is given back
};

// The block of a Take or a GiveBack.
inline BlockKey block_of(const GradStep& step) {
  return {step.unit, step.kind == GradStepKind::Take ? step.to : step.from, step.region};
}

// Carries out steps.
class GradSteps {
 public:
  virtual void run(const GradStep& step) = 0;

 protected:
  ~GradSteps() = default;
};

inline GradStep make_step(
    GradStepKind kind,
    RegionKey key,
    Memory from = Memory::Kept,
    Memory to = Memory::Kept) {
  return {.kind = kind, .unit = key.first, .region = key.second, .from = from, .to = to};
}

} // namespace zerocore
