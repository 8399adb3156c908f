// One unit: its parameters, and the transitions between sharded and unsharded.
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
  // Returns a tag with the unit's name for a collective, and adds the collective to the trace.
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
  // parameter is not gathered (ParamSpec::is_gathered), the full one has memory for one element.
  at::Tensor make_full(int param) const;
  at::Tensor make_shard(int param) const;
  // Returns this rank's elements of the model weight if make_shard() is a main weight; else
  // undefined.
  at::Tensor make_model_shard(int param) const;
  // Takes the leaves of make_full() and make_shard() for the modules. `local` is the memory of a
  // shard that is a DTensor, else undefined.
  void bind(int param, at::Tensor full, at::Tensor shard, at::Tensor local);

  // Allocates the persistent memory if there is none, and fills it from `full`, in the order of
  // params(). With `broadcast`, rank 0's values win; other ranks' may be undefined. By rows all are
  // undefined: the shards stay zero until Python fills them.
  void materialize(const std::vector<at::Tensor>& full, bool broadcast);
  // Moves shards of whole parameters to the memory that programs have set as their data. Copies
  // values with other strides.
  void follow_whole();
  // Returns the full parameters on every rank, in new memory: main weights if there are any.
  std::vector<at::Tensor> full_values() const;

  // Note [Writes in a forward]
  // A call may change parameters in place, and ranks make the call at different times. Each rank
  // must see its own writes: it saves a copy of the full parameters and applies it to later gathers
  // of the pass. Its shard takes the writes once all ranks have left the pass.
  void save_write();
  bool has_saved_write() const {
    return written_full_.defined();
  }
  void finish_write();
  // Remembers which full parameters were written since the last call, to write them back. Returns
  // false if none was.
  bool take_writes();
  // Forgets the writes to write back.
  void drop_writes() {
    written_params_.clear();
    written_full_.reset();
  }
  // Returns the values, 1-D, of the parameters to write back; others are undefined.
  std::vector<at::Tensor> written_values() const;

  // Starts the unit's all-gathers. At stages 1 and 2 only changed regions are gathered.
  void unshard();
  // Makes the compute stream wait for the all-gathers.
  void wait_for_unshard() {
    unsharding_.wait(runner_);
  }
  // Tells the hand-over checker that the compute stream reads the full parameters now.
  void note_use() const;
  // Drops the gathered parameters and frees their block in the pool.
  void reshard();
  // Copies this rank's part of the full parameters to its shard: of all parameters, or of those to
  // write back. A main weight changes only if its model weight was changed.
  void write_back(bool all);
  // After a change of the shards: casts main weights to model weights, and sends those on the host
  // to the device.
  void cast_changes() {
    note_change();
    cast_main();
  }
  void cast_main();
  // Records that the optimizer has cast the main weights that it updated.
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
  // Returns full parameters that the user set to other memory (`p.data = t`) to the unit's memory.
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
  // Records the present version of the shards as the gathered one.
  void mark_taken();
  // mark_taken(), and bumps autograd's versions. Returns whether a trained parameter has changed.
  bool mark_fresh();
  // Records that a call has written to the parameters in place. Another rank may write its part
  // after an all-gather of the same pass, so the gathered values are stale at the end of the pass.
  void mark_written() {
    written_ = true;
  }
  bool is_fresh() const {
    return !written_ && gathered_version_ == version();
  }
  // Returns true if the shards were written directly since they were gathered or marked fresh. It
  // then also casts main weights for the next all-gather.
  bool cast_shard_changes();
  // Returns whether the full parameters equal the shards, perhaps after a pending all-gather.
  bool is_gathered() const;
  // Returns whether this rank has the parameter's full value now, bit for bit, without
  // communication.
  bool holds_values(int param) const;
  // Returns the bytes on the device that persist between steps, without main weights.
  int64_t persistent_nbytes() const;
  // Returns the parameters' persistent memory: the shards, or the full parameters.
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
  // Tells the hand-over checker that the compute stream writes the shards now.
  void note_change() const;
  void begin_gathers(const std::vector<int>& regions);
  at::Tensor model_part(int param) const;
  // Return this rank's part of a region, 1-D: the part that all-gathers send, and the part that the
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
  const std::optional<Bucket>& shards_; // memory_'s; nullopt if full parameters are persistent
  MainWeights main_;
  Unsharding unsharding_;
  StepRunner runner_;
  UnitSettings settings_;
  ParamVersions versions_;
  std::vector<int64_t> gathered_; // the version of each region in bucket_
  int64_t gathered_version_ = -1;
  int64_t begun_version_ = -1; // the version of the last all-gather
  int64_t shards_version_ = -1; // of_shards() when the unit was last gathered or marked fresh
  bool written_ = false; // calls have written in place since mark_fresh()
  at::Tensor written_full_; // the saved copy, as bytes; see Note [Writes in a forward]
  std::vector<int> written_params_; // parameters to write back
  int64_t cast_version_ = -1;
};

using Units = std::vector<std::unique_ptr<Unit>>; // by id

// Makes the units; `contexts` has one entry for each mesh, by number.
Units make_units(std::vector<UnitSpec> specs, const std::vector<UnitContext>& contexts);
// Returns the collectives of all units, each once.
std::vector<Collectives*> collectives_of(const Units& units);

} // namespace zerocore
