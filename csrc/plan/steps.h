// The steps of all-gathers and reductions: allocate or free memory, move values, start or wait for
// a collective; integers only.
//
// Unsharding and Reduction decide the steps. The engine carries them out with tensors
// (engine/unit/step_runner.h), the planner with sizes (plan/step_simulation.h), so it predicts the
// engine's steps. Each step is carried out before the next one is decided.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "common/types.h"
#include "plan/pool_map.h"
#include "plan/unit_mesh.h"

namespace zerocore {

enum class StepKind : uint8_t {
  Take, // allocates `to`: a block of the pool that `stream` writes first, or Kept, which persists
  Free, // frees the block `from` if it is taken; `stream` used it last
  Order, // makes later work of `stream` wait for earlier work of `behind`
  Move, // moves values from `from` to `to` as `how` says
  Start, // starts a collective over `axis`; all-gathers send `from`, or this rank's part of `to`
  Wait, // waits for the all-gathers if `to` is Full, else for the region's reductions
  Ready, // `to` has its values: Shard from the disk, Full for the layers, Kept for the host
  Count, // only adds to the trace
};

enum class How : uint8_t {
  Copy, // copies between the device and the host
  CopyOut, // copies Received, in rank order, to the parameters in Full
  Encode, // encodes this rank's part of `to` for a one-byte all-gather
  Keep, // copies this rank's part of Full to Near
  Pack, // packs the backward's gradients; see Reduction::added()
  Cast, // casts and scales
  Sum, // sums the `parts` of `from` into the elements of `to` that this rank sums
  Zero, // zeroes the kept gradient of `param`, which holds a stale value
};

// The part of a unit's gradient scale that a step applies, see Note [Scale of gradients].
enum class ScalePart : uint8_t { None, All, Packed, Rest, RestUndone };

struct Step {
  StepKind kind = StepKind::Count;
  UnitId unit = -1;
  int region = -1; // -1 for all regions
  Memory from = Memory::Shard, to = Memory::Full;
  How how = How::Copy;
  std::optional<TraceOp> op = std::nullopt; // the operation in the trace
  AxisName axis = AxisName::State;
  int64_t nbytes = 0; // bytes of the block, or bytes in the trace
  int64_t parts = 1; // addends of a sum; values per element in the result of a collective
  bool adds = false; // adds to the values of `to`
  int param = -1;
  ScalePart scale = ScalePart::None; // multiplies the written values
  StreamRole stream = StreamRole::Compute, behind = StreamRole::Compute;
};

// Returns the block of a Take or a Free.
inline BlockKey block_of(const Step& step) {
  const Memory memory = step.kind == StepKind::Take ? step.to : step.from;
  return {step.unit, memory, std::max(step.region, 0)};
}

class Steps {
 public:
  virtual void run(const Step& step) = 0;

 protected:
  ~Steps() = default;
};

} // namespace zerocore
