// Decides how the parameters of one unit are gathered and given back; integers only.
//
// Note [Where parameters live]
// stage 0 to 2  Full stays. This rank's shard is its part of Full; a gather reads it there, and
//               only regions that have changed are gathered.
// stage 3       Shard is memory of its own, on the device, the host or the disk. Full is a block of
//               the pool from a gather to the reshard.
// A layout of rows is gathered into Received, a block that is copied out to Full and given back; so
// is one of encoded parameters, whose rank's part is made in that block.
// With near ranks a part of Full stays in Near, from the first reshard until the parameters change.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "plan/layout.h"
#include "plan/shard_options.h"
#include "plan/steps.h"
#include "plan/unit_mesh.h"

namespace zerocore {

// SHARDED > UNSHARDING > UNSHARDED > SHARDED; where Full stays: UNSHARDED > UNSHARDING > UNSHARDED
enum class ShardedState : uint8_t { Sharded, Unsharding, Unsharded };

class Unsharding {
 public:
  // The layout outlives it. `on_host`: collectives run on no stream, the host waits for them.
  Unsharding(
      UnitId unit,
      const UnitMesh& mesh,
      const Tiers& tiers,
      bool on_host,
      const Layout& layout)
      : unit_(unit),
        mesh_(mesh),
        tiers_(tiers),
        on_host_(on_host),
        layout_(layout),
        received_(layout.encoded()),
        copies_out_(layout.copies_out()),
        state_(mesh.shards_parameters ? ShardedState::Sharded : ShardedState::Unsharded),
        has_full_(!mesh.shards_parameters) {}

  ShardedState state() const {
    return state_;
  }
  // Gathers `regions`: all where parameters are sharded, else those that have changed. A unit that
  // is in use already stays where it is. `again`: nothing has changed since the gather before.
  void begin(const std::vector<int>& regions, bool again, Steps& steps);
  // Completes the gathers that begin() has started, if there are any.
  void wait(Steps& steps);
  // Completes them and gives Full back; the unit is not sharded.
  void reshard(Steps& steps);
  // Whether a reshard may fill Near, as it does from the beginning; false also drops what is there.
  void set_keeps_near(bool keeps) {
    keeps_near_ = keeps;
    has_near_ = has_near_ && keeps;
  }

 private:
  void start_across(const std::vector<int>& regions, Steps& steps) const;
  void start(int region, Steps& steps) const;
  void start_near(int region, Steps& steps) const;
  void take(Memory memory, StreamRole user, Steps& steps);
  void free(Memory memory, int64_t nbytes, Steps& steps) const;

  const UnitId unit_;
  const UnitMesh mesh_;
  const Tiers tiers_;
  const bool on_host_;
  const Layout& layout_;
  Layout received_; // as gathers move it
  bool copies_out_;
  ShardedState state_;
  bool has_full_; // a block, or memory that stays
  bool keeps_near_ = true;
  bool has_near_ = false; // Near holds this rank's part
  bool is_near_ = false; // the gather that began last comes from the near ranks
  bool receives_ = false; // it goes to Received
  bool is_whole_ = false; // all of its regions began
};

} // namespace zerocore
