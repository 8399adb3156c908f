// One unit: its parameters, sharded and unsharded, and the moves between the two states.
//
// Note [Main and model weights]
// Layers compute with model weights, which gathers move. Where the optimizer is to update another
// dtype, this rank also holds main weights, its shard only; they are cast to model weights once
// after every change, not once for every gather. What is loaded and saved are main weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "engine/param_versions.h"
#include "engine/peers.h"
#include "engine/staging.h"
#include "engine/unit_param.h"
#include "plan/layout.h"
#include "plan/stage_policy.h"
#include "plan/tiers.h"
#include "runtime/bucket.h"
#include "runtime/bucket_pool.h"
#include "runtime/collectives.h"

namespace zerocore {

// SHARDED > UNSHARDING > UNSHARDED > SHARDED
enum class UnitState : uint8_t { Sharded, Unsharding, Unsharded };

// Shared by the units of a model; outlives them.
struct UnitContext {
  StagePolicy policy;
  Collectives* collectives = nullptr; // of the ranks that share a shard each; null on one rank
  Collectives* replicas = nullptr; // of the ranks that hold the same shard; null if there is one
  Peers* peers = nullptr; // all ranks; null where there is one or the others are simulated
  Streams* streams = nullptr;
  BucketPool* pool = nullptr;
  Trace* trace = nullptr;
  int64_t num_shards = 1;
  int64_t shard = 0; // this rank's
  bool by_rows = false; // see Note [Shards of rows]
  Tiers tiers; // see Note [States on the host]

  // All ranks.
  int64_t world_size() const {
    return (collectives == nullptr ? 1 : collectives->size()) *
        (replicas == nullptr ? 1 : replicas->size());
  }
  // For each flag whether it is set on any rank; blocks the host.
  std::vector<bool> any_rank(const std::vector<bool>& flags) const {
    return peers == nullptr ? flags : peers->any_rank(flags);
  }
};

// What may be set for each unit.
struct UnitSettings {
  double gradient_scale = 1; // gradients are multiplied by it before they are summed over the ranks
  bool syncs = true; // a backward reduces them
};

class Unit {
 public:
  Unit(UnitId id, UnitSpec spec, const UnitContext& context);
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
  const std::vector<UnitParam>& params() const {
    return params_;
  }
  const UnitContext& context() const {
    return context_;
  }
  // Names a collective for the unit, and adds it to the trace.
  CollectiveTag tag(TraceOp op, int64_t nbytes) const {
    return {
        &name_, context_.trace->add(op, id_, nbytes, context_.pool->stats().in_use_nbytes), id_};
  }
  UnitState state() const {
    return state_;
  }

  UnitSettings& settings() {
    return settings_;
  }
  const UnitSettings& settings() const {
    return settings_;
  }
  // Shape of this rank's part of a parameter: 1-D, or by rows all dimensions.
  std::vector<int64_t> shard_sizes(int param) const;

  // New leaves over the unit's memory, to be wrapped as parameters.
  at::Tensor make_full(int param) const;
  at::Tensor make_shard(int param) const;
  // This rank's elements of the model weight where make_shard() is a main weight, else undefined.
  at::Tensor make_model_shard(int param) const;
  // The leaves of make_full() and make_shard() as the modules hold them from now on.
  // `local`: the memory of a shard that is a DTensor, else undefined.
  void bind(int param, at::Tensor full, at::Tensor shard, at::Tensor local);

  // Allocates the persistent memory if there is none and fills it from `full`, the parameters'
  // values in the order of params(). With broadcast, rank 0's values win; others' may be undefined.
  // By rows all are undefined: whoever binds the shards, which are zero, fills them.
  void materialize(const std::vector<at::Tensor>& full, bool broadcast);
  // The reverse: full parameters on every rank, in new memory; main weights where there are some.
  std::vector<at::Tensor> full_values() const;

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
  // Copies this rank's part of the unsharded parameters to its shard. A main weight changes only
  // where its model weight was changed.
  void write_back();
  // Casts changed main weights to model weights, and sends them to the device.
  void cast_main();
  // See Note [States on the host]: whether the parameter's weights are updated there.
  bool is_updated_on_host(int param) const;
  // Copies the weights of the host to the device: between what the compute stream was given and
  // what it will be. Or in two parts, of which another thread may do the second.
  void return_weights() const;
  void order_send() const;
  void send() const;
  int64_t sent_nbytes() const;
  // The model weights are those of the main weights: whoever updated these has cast them.
  void mark_cast() {
    cast_version_ = version();
  }

  // Changes whenever the optimizer or the user changed the shards.
  int64_t version() const {
    return versions_.of_unit();
  }
  ParamVersions& versions() {
    return versions_;
  }
  // The unsharded parameters are those of the shards, in all regions.
  void mark_gathered();
  // The gathered parameters are, from now on, those that the shards hold.
  void mark_fresh();
  // Unsharded parameters that stay are those of the shards, or a gather under way makes them so.
  bool is_gathered() const;
  int64_t gathered_version() const {
    return gathered_version_;
  }
  // Bytes on the device that stay on this rank between steps: of parameters without main weights,
  // and of these.
  int64_t persistent_nbytes() const;
  int64_t main_nbytes() const {
    return main_ && !context_.tiers.has_host_states() ? main_->nbytes() : 0;
  }
  // Of parameters on the host.
  int64_t host_nbytes() const;

 private:
  void set_state(UnitState next);
  c10::Device device_of(Tier tier) const;
  bool has_main(int region) const {
    return main_ && main_->has(region);
  }
  at::Tensor model_part(int param) const;
  // The host's weights of a region in the type that layers compute in.
  const at::Tensor& returned_shard(int region) const;
  // Persistent memory, 1-D, this rank's part of a region: what gathers send, what is updated.
  const at::Tensor& model_shard(int region) const;
  const at::Tensor& updated_shard(int region) const;
  void allocate_persistent();
  void take(const Bucket& staging);
  bool is_gathered(int region) const {
    return gathered_[region] == versions_.of_region(region);
  }
  void gather(int region);
  void take_bucket(StreamRole user);

  UnitId id_;
  std::string name_;
  std::vector<UnitParam> params_;
  UnitContext context_;
  Layout layout_;
  Bucket bucket_; // unsharded
  std::optional<Staging> staging_; // as it comes from the wire, where that is another order
  std::optional<Bucket> shards_; // own memory where parameters are sharded
  std::optional<Bucket> main_; // the regions that have main weights
  std::optional<Bucket> sent_; // main weights on the host as layers compute with them
  Slot slot_;
  UnitSettings settings_;
  std::vector<PendingCollective> gathers_;
  UnitState state_ = UnitState::Sharded;
  ParamVersions versions_;
  std::vector<int64_t> gathered_; // version of each region that is in the buffer
  int64_t gathered_version_ = -1;
  int64_t cast_version_ = -1;
};

} // namespace zerocore
