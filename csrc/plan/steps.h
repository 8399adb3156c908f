// The steps of which all-gathers and reductions consist: memory is taken and freed, values move,
// collectives start and are waited for; integers only.
//
// Unsharding and Reduction decide the steps. The engine carries them out with tensors
// (engine/unit/step_runner.h), the planner with sizes (plan/step_simulation.h), so it predicts what
// the engine does. Each step is carried out before the next one is decided.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "common/types.h"
#include "plan/pool_map.h"
#include "plan/unit_mesh.h"

namespace zerocore {

enum class StepKind : uint8_t {
  Take, // allocates `to`: a block of the pool that `stream` writes first, or Kept, which stays
  Free, // gives the block `from` back, if it is taken; `stream` used it last
  Order, // makes later work of `stream` wait for earlier work of `behind`
  Move, // moves values of `from` to `to`, as `how` says
  Start, // starts a collective over `axis`; all-gathers send `from`, or this rank's part of `to`
  Wait, // waits for the all-gathers if `to` is Full, else for the region's reductions
  Ready, // `to` has its values: a Shard from the disk, Full for the layers, Kept for the host
  Count, // only counts in the trace
};

enum class How : uint8_t {
  Copy, // copies between the device and the host
  CopyOut, // copies Received, in rank order, to the parameters in Full
  Encode, // encodes this rank's part of `to` for a one-byte gather
  Keep, // copies this rank's part of Full to Near
  Pack, // packs the backward's gradients; see Reduction::added()
  Cast, // casts and scales
  Sum, // sums the `parts` of `from` into the elements of `to` that this rank sums
  Zero, // zeroes the kept gradient of `param`, whose memory holds an old value
};

// The factor of a unit's gradient scale that a step applies, see Note [Scale of gradients].
enum class ScalePart : uint8_t { None, All, Packed, Rest, RestUndone };

struct Step {
  StepKind kind = StepKind::Count;
  UnitId unit = -1;
  int region = -1; // -1 for all
  Memory from = Memory::Shard, to = Memory::Full;
  How how = How::Copy;
  std::optional<TraceOp> op = std::nullopt; // the operation that the trace counts
  AxisName axis = AxisName::State;
  int64_t nbytes = 0; // size of the block, or bytes that the trace counts
  int64_t parts = 1; // addends of a sum; values that a collective leaves for each element
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
