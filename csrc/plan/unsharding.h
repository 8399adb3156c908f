// Decides the steps that unshard and reshard one unit; integers only.
//
// Note [Where parameters live]
// stage 0 to 2  Full is persistent. This rank's shard is its part of Full, which all-gathers send.
// They
//               gather changed regions only.
// stage 3       Shard is memory of its own, on the device, the host or the disk. Full is a block of
//               the pool from the all-gather to the reshard.
// A layout by rows is gathered into Received, a block of the pool, then copied out to Full. The
// same holds for encoded parameters; each rank encodes its part into Received.
// With near ranks, Near keeps a part of Full from the first reshard until the parameters change.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "plan/layout.h"
#include "plan/shard_options.h"
#include "plan/steps.h"
#include "plan/unit_mesh.h"

namespace zerocore {

// Sharded > Unsharding > Unsharded > Sharded; persistent Full: Unsharded > Unsharding > Unsharded
enum class ShardedState : uint8_t { Sharded, Unsharding, Unsharded };

class Unsharding {
 public:
  // `layout` must outlive the object. `on_host`: the host waits for collectives, which run on no
  // stream.
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
  // Starts the all-gathers of `regions`: all at stage 3, else the changed ones. A unit in use keeps
  // its block. `again`: no parameter has changed since the last all-gather.
  void begin(const std::vector<int>& regions, bool again, Steps& steps);
  // Completes the all-gathers that begin() started, if any.
  void wait(Steps& steps);
  // Completes the all-gathers and frees Full. The unit must not be sharded.
  void reshard(Steps& steps);
  // Sets whether a reshard may fill Near (at first it may). False also forgets Near's values.
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
  Layout received_; // the layout on the wire, encoded
  bool copies_out_;
  ShardedState state_;
  bool has_full_; // Full has memory
  bool keeps_near_ = true;
  bool has_near_ = false; // Near holds this rank's part
  bool is_near_ = false; // the last all-gather goes over the near ranks
  bool receives_ = false; // the last all-gather goes to Received
  bool is_whole_ = false; // the last all-gather has started for all regions
};

} // namespace zerocore
