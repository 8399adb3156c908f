// One unit: its parameters, sharded and unsharded, and the moves between the two states.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "plan/layout.h"
#include "plan/stage_policy.h"
#include "runtime/bucket.h"
#include "runtime/bucket_pool.h"
#include "runtime/collectives.h"

namespace zerocore {

// SHARDED > UNSHARDING > UNSHARDED > SHARDED
enum class UnitState : uint8_t { Sharded, Unsharding, Unsharded };

// What units share; outlives them.
struct UnitContext {
  StagePolicy policy;
  Collectives* collectives = nullptr; // null on one rank
  Streams* streams = nullptr;
  BucketPool* pool = nullptr;
  Trace* trace = nullptr;
  int64_t num_shards = 1;
  int64_t shard = 0; // this rank's
};

struct UnitParam {
  ParamSpec spec;
  std::vector<int64_t> strides; // of the full parameter; dense in some order of its dimensions
  at::Tensor full; // the leaf that forward and backward compute with
  at::Tensor shard; // the leaf that the optimizer sees, 1-D
  bool hooked = false; // the leaf reports its gradient
};

class Unit {
 public:
  Unit(UnitId id, std::string name, std::vector<UnitParam> params, const UnitContext& context);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  UnitId id() const {
    return id_;
  }
  const std::string& name() const {
    return name_;
  }
  const Layout& layout() const {
    return layout_;
  }
  std::vector<UnitParam>& params() {
    return params_;
  }
  const UnitContext& context() const {
    return context_;
  }
  UnitState state() const {
    return state_;
  }

  // New leaves over the unit's memory, to be wrapped as parameters.
  at::Tensor make_full(int param) const;
  at::Tensor make_shard(int param) const;
  // Persistent memory, 1-D, this rank's part of a region.
  const at::Tensor& shard(int region) const;

  // Allocates the persistent memory and fills it from `full`, the parameters' values in the order
  // of params(). With broadcast, rank 0's values win.
  void materialize(const std::vector<at::Tensor>& full, bool broadcast);

  // Sharded > Unsharding: issues the gathers. Where unsharded parameters stay, only of regions that
  // have changed since.
  void unshard();
  // Unsharding > Unsharded: orders compute behind the gathers.
  void wait_for_unshard();
  // For the checker: the compute stream reads the unsharded parameters now.
  void note_use() const;
  // For the checker: the compute stream has changed the shards.
  void note_change() const;
  // > Sharded: forgets the gathered parameters and gives the slot back.
  void reshard();
  // Copies this rank's part of the unsharded parameters to its shard.
  void write_back();

  // Changes whenever the optimizer or the user changed the shards.
  int64_t version() const;
  // For changes that no version counter shows (`.data`): of any parameters, or, by an optimizer,
  // of those that require grad.
  void mark_changed();
  void mark_updated();
  // The unsharded parameters are those of the shards, in all regions.
  void mark_gathered();
  // What is gathered now is what the shards hold.
  void mark_fresh() {
    gathered_version_ = version();
  }
  int64_t gathered_version() const {
    return gathered_version_;
  }
  // Bytes of parameters that stay on this rank between steps.
  int64_t persistent_nbytes() const;

 private:
  void set_state(UnitState next);
  void broadcast_full();
  void wait_for_all(std::vector<PendingCollective>& collectives) const;
  void fill(const std::vector<at::Tensor>& full);
  int64_t region_version(int region) const;
  void gather(int region);

  UnitId id_;
  std::string name_;
  std::vector<UnitParam> params_;
  UnitContext context_;
  Layout layout_;
  Bucket bucket_; // unsharded
  std::optional<Bucket> shards_; // own memory where parameters are sharded
  Slot slot_;
  std::vector<PendingCollective> gathers_;
  UnitState state_ = UnitState::Sharded;
  std::vector<int64_t> changes_; // of each region
  std::vector<int64_t> gathered_; // version of each region that is in the buffer
  int64_t gathered_version_ = -1;
};

} // namespace zerocore
