// The steps of gathers and reductions, in one language: which memory they take, what goes where,
// which collectives run; integers only.
//
// Unsharding and Reduction decide them. The engine carries them out with tensors
// (engine/unit/step_runner.h), the planner with sizes (plan/step_simulation.h), so that the one
// predicts what the other does. Each step is carried out before the next one is decided.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "common/types.h"
#include "plan/pool_map.h"
#include "plan/unit_mesh.h"

namespace zerocore {

enum class StepKind : uint8_t {
  Take, // `to` has memory: a block of the pool, which `stream` writes to first; Kept what stays
  Free, // `from` has none any more, if it had; `stream` used it last
  Order, // later work of `stream` runs behind what `behind` was given so far
  Move, // values of `from` go to `to`, as `how` says
  Start, // a collective over `axis`; of a gather `from` is this rank's part of `to` or has it
  Wait, // for gathers into `to`, which is Full, and else for the region's reductions
  Ready, // `to` may be read by others from here on: Shard by this rank, Full by layers, Kept
  Count, // only counts
};

enum class How : uint8_t {
  Copy, // between the device and the host
  CopyOut, // Received goes to its places in Full
  Encode, // this rank's part of `to`
  Keep, // this rank's part of Full among the near ranks
  Pack, // the gradients of the backward; see Reduction::added()
  Cast,
  Sum, // the `parts` of `from`, to what this rank sums of `to`
  Zero, // the kept gradient of `param`, whose memory still holds an old value
};

// Of a unit's gradient scale, see Note [Scale of gradients].
enum class ScalePart : uint8_t { None, All, Packed, Rest, RestUndone };

struct Step {
  StepKind kind = StepKind::Count;
  UnitId unit = -1;
  int region = -1; // -1 for all
  Memory from = Memory::Shard, to = Memory::Full;
  How how = How::Copy;
  std::optional<TraceOp> op = std::nullopt; // what the trace counts
  AxisName axis = AxisName::State;
  int64_t nbytes = 0; // of the block, of what is counted
  int64_t parts = 1; // of a sum; of what a collective leaves for each element
  bool adds = false; // to what `to` holds
  int param = -1;
  ScalePart scale = ScalePart::None; // of what is written
  StreamRole stream = StreamRole::Compute, behind = StreamRole::Compute;
};

// The block of a Take or a Free.
inline BlockKey block_of(const Step& step) {
  const Memory memory = step.kind == StepKind::Take ? step.to : step.from;
  return {step.unit, memory, std::max(step.region, 0)};
}

// Carries out steps.
class Steps {
 public:
  virtual void run(const Step& step) = 0;

 protected:
  ~Steps() = default;
};

} // namespace zerocore
