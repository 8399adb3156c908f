// One unit: its parameters, sharded and unsharded, and the moves between the two states.
#pragma once

#include <ATen/core/Tensor.h>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/unit/main_weights.h"
#include "engine/unit/step_runner.h"
#include "engine/unit/unit_context.h"
#include "engine/unit/unit_memory.h"
#include "engine/unit/unit_param.h"
#include "memory/bucket.h"
#include "plan/layout.h"
#include "plan/unsharding.h"

namespace zerocore {

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
    return {&name_, context_.note(op, id_, nbytes), id_};
  }
  ShardedState state() const {
    return unsharding_.state();
  }

  UnitSettings& settings() {
    return settings_;
  }
  const UnitSettings& settings() const {
    return settings_;
  }
  // Shape of this rank's part of a parameter: 1-D, or by rows all dimensions.
  std::vector<int64_t> shard_sizes(int param) const;

  // New leaves over the unit's memory, to be wrapped as parameters. One that is not gathered has
  // none.
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

  // Note [Writes in a forward]
  // A call may change parameters in place, and ranks come to it at different times. Each reads the
  // unit as it is behind the writes that it has made itself: it keeps the full parameters and lays
  // them over what it gathers later in the pass. Its part for the others changes when all have left
  // the pass.
  void keep_write();
  bool keeps_write() const {
    return written_full_.defined();
  }
  void finish_write();
  // The unsharded parameters are the ones to write back where they were written to since the last
  // call. False if none was.
  bool take_writes();
  // Nothing is to be written back.
  void drop_writes() {
    written_params_.clear();
    written_full_.reset();
  }
  // Of parameters that are to be written back the values, 1-D, others undefined.
  std::vector<at::Tensor> written_values() const;

  // Sharded > Unsharding: issues the gathers. Where unsharded parameters stay, only of regions that
  // have changed since.
  void unshard();
  // Unsharding > Unsharded: orders compute behind the gathers.
  void wait_for_unshard() {
    unsharding_.wait(runner_);
  }
  // For the checker: the compute stream reads the unsharded parameters now.
  void note_use() const;
  // > Sharded: forgets the gathered parameters and gives the slot back.
  void reshard();
  // Copies this rank's part of the unsharded parameters that are to be written back, or of all of
  // them, to its shard. A main weight changes only where its model weight was changed.
  void write_back(bool all);
  // The shards have changed: casts main weights to model weights, and sends them to the device.
  void cast_changes() {
    note_change();
    cast_main();
  }
  void cast_main();
  // The model weights are those of the main weights: whoever updated these has cast them.
  void mark_cast() {
    cast_version_ = version();
  }
  bool is_cast() const {
    return main_.empty() || cast_version_ == version();
  }

  // Changes whenever the optimizer or the user changed the shards.
  int64_t version() const {
    return versions_.of_unit();
  }
  // Parameters that were set to other memory (`p.data = t`) go back to the unit's. With `keeps`
  // their values come along and count as changed. Those that there were.
  std::vector<int> take_back(bool keeps);
  ParamVersions& versions() {
    return versions_;
  }
  const ParamVersions& versions() const {
    return versions_;
  }
  // The unsharded parameters are those of the shards, in all regions.
  void mark_gathered();
  // The gathered parameters are, from now on, those that the shards hold.
  void mark_taken();
  // The same, and tells autograd. True if a parameter that requires grad has changed.
  bool mark_fresh();
  // A call has changed the parameters in place. Another rank may change its part later in the same
  // pass than a gather, so what the pass gathered is stale when it has ended.
  void mark_written() {
    written_ = true;
  }
  bool is_fresh() const {
    return !written_ && gathered_version_ == version();
  }
  // False unless the shards were changed by themselves since they were gathered last, or marked as
  // fresh. Then the next gather is one of what they are now.
  bool cast_shard_changes();
  // Unsharded parameters that stay are those of the shards, or a gather under way makes them so.
  bool is_gathered() const;
  // The unsharded parameter stays and is that of all ranks' shards now, bit for bit; asks no rank.
  bool holds_values(int param) const;
  // Bytes on the device that stay on this rank between steps, without main weights.
  int64_t persistent_nbytes() const;
  // Parameters that stay between steps.
  const Bucket& kept() const {
    return shards_ ? *shards_ : bucket_;
  }
  // The weights that the optimizer updates, where they are no part of the unit's own memory.
  const MainWeights& main() const {
    return main_;
  }
  // See Unsharding; false frees the memory, too.
  void set_keeps_near(bool keeps);
  UnitMemory& memory() {
    return memory_;
  }
  StepRunner& runner() {
    return runner_;
  }

 private:
  // For the checker: the compute stream has changed the shards.
  void note_change() const;
  void begin_gathers(const std::vector<int>& regions);
  at::Tensor model_part(int param) const;
  // Persistent memory, 1-D, this rank's part of a region: what gathers send, what is updated.
  const at::Tensor& model_shard(int region) const;
  const at::Tensor& updated_shard(int region) const;
  void allocate_persistent();
  void take(const Bucket& staging);
  bool is_gathered(int region) const {
    return gathered_[region] == versions_.of_region(region);
  }
  void write_back(const Bucket& full);
  // A bucket as the unit's own over other memory of the same size.
  Bucket over(const at::Tensor& bytes) const;
  at::Tensor part_of(const Bucket& full, int param) const;

  UnitId id_;
  std::string name_;
  std::vector<UnitParam> params_;
  UnitContext context_;
  Layout layout_;
  UnitMemory memory_;
  Bucket& bucket_; // of it: unsharded
  const std::optional<Bucket>& shards_; // the same: where parameters are sharded
  MainWeights main_;
  Unsharding unsharding_;
  StepRunner runner_;
  UnitSettings settings_;
  ParamVersions versions_;
  std::vector<int64_t> gathered_; // version of each region that is in the buffer
  int64_t gathered_version_ = -1;
  int64_t begun_version_ = -1; // when the last gather began
  int64_t shards_version_ = -1; // of_shards() then
  bool written_ = false; // by calls, since mark_fresh()
  at::Tensor written_full_; // bytes, see Note [Writes in a forward]
  std::vector<int> written_params_; // to be written back
  int64_t cast_version_ = -1;
};

using Units = std::vector<std::unique_ptr<Unit>>; // by id

// `contexts` by number of the mesh.
Units make_units(std::vector<UnitSpec> specs, const std::vector<UnitContext>& contexts);
// The collectives of all units, each once.
std::vector<Collectives*> collectives_of(const Units& units);

} // namespace zerocore
