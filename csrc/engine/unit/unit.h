// One unit: its parameters, sharded or unsharded, and the way from one state to the other.
#pragma once

#include <ATen/core/Tensor.h>
#include <algorithm>

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
  bool has_whole() const {
    return std::ranges::any_of(params_, &UnitParam::is_whole);
  }
  const UnitContext& context() const {
    return context_;
  }
  // Returns a collective's tag with the unit's name, and adds the collective to the trace.
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
  // Returns the shape of this rank's part of a parameter: 1-D, or by rows with all dimensions.
  std::vector<int64_t> shard_sizes(int param) const;

  // Return new leaf tensors over the unit's memory, which Python wraps as parameters. If the
  // parameter is not gathered (ParamSpec::is_gathered), the full one has one element of memory.
  at::Tensor make_full(int param) const;
  at::Tensor make_shard(int param) const;
  // Returns this rank's elements of the model weight if make_shard() is a main weight, else an
  // undefined tensor.
  at::Tensor make_model_shard(int param) const;
  // Takes the leaves of make_full() and make_shard() that the modules hold from now on. `local` is
  // the memory of a shard that is a DTensor, else undefined.
  void bind(int param, at::Tensor full, at::Tensor shard, at::Tensor local);

  // Allocates the persistent memory if there is none, and fills it from `full`, in the order of
  // params(). With broadcast, rank 0's values win; other ranks' may be undefined. By rows all are
  // undefined: the shards stay zero until Python fills them.
  void materialize(const std::vector<at::Tensor>& full, bool broadcast);
  // Points shards of whole parameters at the memory that programs have set as their data. Copies
  // values whose strides are others.
  void follow_whole();
  // Returns the full parameters on every rank, in new memory: main weights if there are any.
  std::vector<at::Tensor> full_values() const;

  // Note [Writes in a forward]
  // A call may change parameters in place, and ranks reach it at different times. Each rank must
  // see its own writes: it keeps a copy of the full parameters and lays it over what it gathers
  // later in the pass. Its shard takes the writes once all ranks have left the pass.
  void keep_write();
  bool keeps_write() const {
    return written_full_.defined();
  }
  void finish_write();
  // Remembers which full parameters were written since the last call, to write them back. Returns
  // false if none was.
  bool take_writes();
  // Forgets what was to be written back.
  void drop_writes() {
    written_params_.clear();
    written_full_.reset();
  }
  // Returns the values, 1-D, of parameters that are to be written back; others are undefined.
  std::vector<at::Tensor> written_values() const;

  // Starts the unit's all-gathers. At stages 1 and 2 only changed regions are gathered.
  void unshard();
  // Makes the compute stream wait for the all-gathers.
  void wait_for_unshard() {
    unsharding_.wait(runner_);
  }
  // Tells the checker of hand-overs that the compute stream reads the full parameters now.
  void note_use() const;
  // Drops the gathered parameters and gives their block back to the pool.
  void reshard();
  // Copies this rank's part of the full parameters to its shard: of all of them, or of those that
  // are to be written back. A main weight changes only if its model weight was changed.
  void write_back(bool all);
  // After the shards have changed: casts main weights to model weights, and sends those that are
  // on the host to the device.
  void cast_changes() {
    note_change();
    cast_main();
  }
  void cast_main();
  // Notes that the optimizer has cast the main weights that it updated.
  void mark_cast() {
    cast_version_ = version();
  }
  bool is_cast() const {
    return main_.empty() || cast_version_ == version();
  }

  // Returns a number that grows whenever the optimizer or the user changes the shards.
  int64_t version() const {
    return versions_.of_unit();
  }
  // Gives full parameters that the user set to other memory (`p.data = t`) the unit's memory again.
  // With `keeps` it copies their values, which count as changed. Returns these parameters.
  std::vector<int> take_back(bool keeps);
  ParamVersions& versions() {
    return versions_;
  }
  const ParamVersions& versions() const {
    return versions_;
  }
  // Marks the full parameters of all regions as equal to the shards.
  void mark_gathered();
  // Notes the shards' present version as the gathered one.
  void mark_taken();
  // The same, and bumps autograd's versions. Returns whether a parameter that requires grad has
  // changed.
  bool mark_fresh();
  // Notes that a call has written to the parameters in place. Another rank may write its part after
  // an all-gather of the same pass, so at the end of the pass the gathered values are stale.
  void mark_written() {
    written_ = true;
  }
  bool is_fresh() const {
    return !written_ && gathered_version_ == version();
  }
  // Returns true if the shards were written directly since they were gathered or marked fresh. Then
  // it also casts main weights for the next all-gather.
  bool cast_shard_changes();
  // Returns whether the full parameters equal the shards, perhaps after a pending all-gather.
  bool is_gathered() const;
  // Returns whether this rank has the parameter's full value now, bit for bit, without asking
  // another rank.
  bool holds_values(int param) const;
  // Returns the bytes on the device that stay between steps, without main weights.
  int64_t persistent_nbytes() const;
  // Returns the parameters' memory that stays between steps: the shards, or the full parameters.
  const Bucket& kept() const {
    return shards_ ? *shards_ : bucket_;
  }
  // Returns the weights that the optimizer updates, if they have memory of their own.
  const MainWeights& main() const {
    return main_;
  }
  // See Unsharding::set_keeps_near; false also frees the memory.
  void set_keeps_near(bool keeps);
  UnitMemory& memory() {
    return memory_;
  }
  StepRunner& runner() {
    return runner_;
  }

 private:
  // Tells the checker of hand-overs that the compute stream writes the shards now.
  void note_change() const;
  void begin_gathers(const std::vector<int>& regions);
  at::Tensor model_part(int param) const;
  // Return this rank's part of a region, 1-D: the one that all-gathers send, and the one that the
  // optimizer updates.
  const at::Tensor& model_shard(int region) const;
  const at::Tensor& updated_shard(int region) const;
  void allocate_persistent();
  // Returns whether a whole parameter lies in memory that a program has set.
  bool has_moved(size_t param) const;
  void take(const Bucket& staging);
  bool is_gathered(int region) const {
    return gathered_[region] == versions_.of_region(region);
  }
  void write_back(const Bucket& full);
  // Returns a bucket with the unit's layout over `bytes`.
  Bucket over(const at::Tensor& bytes) const;
  at::Tensor part_of(const Bucket& full, int param) const;

  UnitId id_;
  std::string name_;
  std::vector<UnitParam> params_;
  UnitContext context_;
  Layout layout_;
  UnitMemory memory_;
  Bucket& bucket_; // memory_'s full parameters
  const std::optional<Bucket>& shards_; // memory_'s shards; nullopt if full parameters stay
  MainWeights main_;
  Unsharding unsharding_;
  StepRunner runner_;
  UnitSettings settings_;
  ParamVersions versions_;
  std::vector<int64_t> gathered_; // the version of each region in bucket_
  int64_t gathered_version_ = -1;
  int64_t begun_version_ = -1; // the version that the last all-gather moved
  int64_t shards_version_ = -1; // of_shards() when the unit was last gathered or marked fresh
  bool written_ = false; // calls have written in place since mark_fresh()
  at::Tensor written_full_; // the kept copy, as bytes; see Note [Writes in a forward]
  std::vector<int> written_params_; // parameters to be written back
  int64_t cast_version_ = -1;
};

using Units = std::vector<std::unique_ptr<Unit>>; // by id

// Makes the units; `contexts` has one for each mesh, by number.
Units make_units(std::vector<UnitSpec> specs, const std::vector<UnitContext>& contexts);
// Returns the collectives of all units, each once.
std::vector<Collectives*> collectives_of(const Units& units);

} // namespace zerocore
