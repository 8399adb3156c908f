// Decides how the parameters of one unit are gathered and given back; integers only.
//
// The unit carries out the steps with tensors, the planner with sizes: the planner predicts what
// the unit does. Each step is carried out before the next one is decided.
//
// Note [Where parameters live]
// stage 0 to 2  Full stays. This rank's shard is its part of Full; a gather reads it there, and
//               only regions that have changed are gathered.
// stage 3       Own is memory of its own, on the device, the host or the disk. Full is a block of
//               the pool from a gather to the reshard.
// A layout of rows is gathered into Received, a block that is copied out to Full and given back; so
// is one of encoded parameters, whose rank's part is made in that block.
// With near ranks a part of Full stays in Near, from the first reshard until the parameters change.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "plan/layout.h"
#include "plan/pool_map.h"
#include "plan/shard_options.h"
#include "plan/unit_mesh.h"

namespace zerocore {

// SHARDED > UNSHARDING > UNSHARDED > SHARDED; where Full stays: UNSHARDED > UNSHARDING > UNSHARDED
enum class UnitState : uint8_t { Sharded, Unsharding, Unsharded };

enum class GatherStepKind : uint8_t {
  Count, // the trace counts `op`, with `nbytes`
  Take, // `to` is a block of the pool
  GiveBack, // `from` is none any more
  Order, // gathers start behind the compute stream, which reads Full
  Read, // the unit's shard comes from the disk
  Load, // this rank's part of `to` comes from the host
  Encode, // this rank's part of `to` is made of `from`
  StartAcross, // the gather of this rank's part of `to` over the replicas, from `from`
  WaitAcross, // for StartAcross, where no stream keeps the order
  Start, // the gather of a region, from `from` (this rank's part of it) to `to`
  Launch, // no Start follows
  Wait, // for all gathers and loads
  CopyOut, // Received goes to Full
  Show, // layers may read Full
  Keep, // this rank's part of Full goes to Near
};

struct GatherStep {
  GatherStepKind kind = GatherStepKind::Count;
  UnitId unit = -1;
  int region = -1; // -1 for the whole unit
  Memory from = Memory::Shard, to = Memory::Full;
  int64_t nbytes = 0; // of the block, of the load, on the wire
  TraceOp op = TraceOp::Unshard;
  StreamRole user = StreamRole::Compute; // writes first to a block that is taken
};

// The block of a Take or a GiveBack.
inline BlockKey block_of(const GatherStep& step) {
  return {step.unit, step.kind == GatherStepKind::Take ? step.to : step.from};
}

// Carries out steps.
class GatherSteps {
 public:
  virtual void run(const GatherStep& step) = 0;

 protected:
  ~GatherSteps() = default;
};

class Unsharding {
 public:
  // The layout outlives it.
  Unsharding(UnitId unit, const UnitMesh& mesh, const Tiers& tiers, const Layout& layout)
      : unit_(unit),
        mesh_(mesh),
        tiers_(tiers),
        layout_(layout),
        received_(layout.encoded()),
        copies_out_(layout.copies_out()),
        state_(mesh.shards_parameters ? UnitState::Sharded : UnitState::Unsharded),
        has_full_(!mesh.shards_parameters) {}

  UnitState state() const {
    return state_;
  }
  // Gathers `regions`: all where parameters are sharded, else those that have changed. A unit that
  // is in use already stays where it is. `again`: nothing has changed since the gather before.
  void begin(const std::vector<int>& regions, bool again, GatherSteps& steps);
  // Completes the gathers that begin() has started, if there are any.
  void wait(GatherSteps& steps);
  // Completes them and gives Full back; the unit is not sharded.
  void reshard(GatherSteps& steps);
  // Whether a reshard may fill Near, as it does from the beginning; false also drops what is there.
  void set_keeps_near(bool keeps) {
    keeps_near_ = keeps;
    has_near_ = has_near_ && keeps;
  }

 private:
  void start_across(const std::vector<int>& regions, GatherSteps& steps) const;
  void start(int region, GatherSteps& steps) const;
  void start_near(int region, GatherSteps& steps) const;
  void take(Memory memory, StreamRole user, GatherSteps& steps);

  const UnitId unit_;
  const UnitMesh mesh_;
  const Tiers tiers_;
  const Layout& layout_;
  Layout received_; // as gathers move it
  bool copies_out_;
  UnitState state_;
  bool has_full_; // a block, or memory that stays
  bool keeps_near_ = true;
  bool has_near_ = false; // Near holds this rank's part
  bool is_near_ = false; // the gather that began last comes from the near ranks
  bool receives_ = false; // it goes to Received
  bool is_whole_ = false; // all of its regions began
};

} // namespace zerocore
