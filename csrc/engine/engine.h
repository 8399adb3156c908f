// The engine of one sharded model: Python holds it, and it owns all parts.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/model_calls.h"
#include "engine/order_consensus.h"
#include "engine/resources.h"
#include "engine/unit/unit_context.h"
#include "engine/unit_lifecycle.h"

namespace zerocore {

// The name of an optimizer's collectives in the trace, in place of a unit's name.
inline const std::string kOptimizer = "optimizer";

// A pending all-to-all of a matrix optimizer. The context must outlive it.
class Exchange {
 public:
  // Sends each rank of the group its part of `sent` (1-D, rank after rank). `sizes` are in bytes.
  Exchange(
      const UnitContext& context,
      Collectives& group,
      const at::Tensor& sent,
      MessageSizes sizes);

  // Returns the received tensor. The compute stream, or on the CPU the host, waits for it.
  at::Tensor wait();

 private:
  const Streams& streams_;
  at::Tensor received_; // 1-D, of the sent dtype
  PendingCollective pending_;
};

// Note [Gathers after a step]
// At stages 1 and 2 an optimizer's step updates this rank's part of the full parameters. When the
// step ends, all ranks start the all-gathers of the other parts. Later reads and forwards wait for
// these gathers and need no further collective. A unit is gathered once optimizers have updated all
// of its trained parameters, so optimizers that share a unit cause one all-gather. The forward
// gathers all other changes: updates on the host, which continue after the step, and steps inside a
// call, where ranks may be at different units.

// A unit that an optimizer has updated. `params` are the updated parameters; nullopt: all trained
// ones.
struct UpdatedUnit {
  UnitId unit = -1;
  std::optional<std::vector<int>> params;
};

// The engine of one sharded model. Its own functions run between passes; calls() handles forward
// and backward passes.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // `order` has the expected calls of a forward.
  Engine(
      const EngineOptions& options,
      c10::Device device,
      std::vector<UnitSpec> units,
      Instructions order,
      ShowParams show_params);
  ~Engine();

  Unit& unit(UnitId id) {
    return *units_.at(id);
  }
  const Units& units() const {
    return units_;
  }
  Offload& offload() {
    return offload_;
  }
  Reducer& reducer() {
    return reducer_;
  }
  ModelCalls& calls() {
    return calls_;
  }
  const Schedule& schedule() const {
    return schedule_;
  }
  BucketPool& pool() {
    return *context_.pool;
  }
  Trace& trace() {
    return *context_.trace;
  }
  const Streams& streams() const {
    return *context_.streams;
  }
  std::optional<RegisteredStats> registered() const {
    return resources_.registered();
  }
  const std::vector<HandOver>& hand_overs() const {
    return resources_.hand_overs().entries();
  }

  // Begins training, when all parameters are materialized and bound. `consistent`: all ranks hold
  // the same values; otherwise the first forward gathers them.
  void start(bool consistent);

  // Unshards the units and shows their full parameters until release_unsharded. If it throws, it
  // holds no unit.
  void hold_unsharded(const std::vector<UnitId>& units);
  // Ends the hold. Without `write_back`, drops changes and returns the names of the changed
  // parameters.
  std::vector<std::string> release_unsharded(const std::vector<UnitId>& units, bool write_back);
  // Holds a unit without showing it in modules. begin_hold starts its all-gather; wait_held makes
  // the compute stream wait for it. Allowed in a parked model whose unit has its memory again.
  void begin_hold(UnitId unit);
  void wait_held(UnitId unit);
  // Starts the unit's all-gather ahead of its next forward; modules show the parameters after
  // UnitLifecycle::use. Collective.
  void unshard(UnitId unit);
  // Reshards the unit if nothing uses it. All ranks must call it.
  void reshard(UnitId unit);
  void set_staying(UnitId unit, Staying staying) {
    schedule_.residency().set_staying(unit, staying);
  }
  // Parks the model: waits for the host, updates the values that all-gathers read, and frees the
  // pool's arena. The caller may then free the units' device memory. Uses of the model throw until
  // it is unparked. Collective.
  void set_parked(bool parked);
  // Returns the unit's persistent device memory, as bytes: the parameters first, then the memory
  // that only optimizers and reductions use.
  std::vector<at::Tensor> device_memory(UnitId unit) const;
  // Allocates the memory of a freed tensor of device_memory() again, uninitialised.
  void take_memory(const at::Tensor& tensor) {
    give_memory(tensor, context_.memory_for(tensor));
  }
  UnitLifecycle& lifecycle() {
    return lifecycle_;
  }
  Agreed agreed() const {
    return consensus_.agreed(calls_.num_backward_shapes());
  }
  // Set and return a unit's parameters, see Unit. Both are collective and wait for updates on the
  // host.
  void materialize(UnitId unit, const std::vector<at::Tensor>& full, bool broadcast);
  std::vector<at::Tensor> full_values(UnitId unit);
  // Bracket an optimizer's update of main weights; with `casts` it also writes the model weights.
  // begin_update throws if a shard no longer lies in the unit's memory.
  void begin_update(const std::vector<UnitId>& units, bool casts);
  // Returns true if all-gathers have begun. They read the shards until finish_gathers or the next
  // use of their units.
  bool end_update(const std::vector<UpdatedUnit>& units, bool casts);
  // Waits for the all-gathers that read shards, before these change. If a unit's all-gather fails,
  // its next use gathers it again.
  void finish_gathers();
  // Suspends reductions and resharding, for the step of a zero-bubble pipeline schedule.
  void begin_deferred();
  // Resumes them. With `drops` it resets the model, otherwise it reduces the gradients.
  void end_deferred(bool drops);
  // Returns for each flag whether any rank sets it. Collective.
  std::vector<bool> any_rank(const std::vector<bool>& flags);
  // Starts an all-to-all: with `across` over the ranks with the same shards, otherwise over the
  // ranks that share the state. Collective. The engine must outlive the result.
  Exchange exchange(size_t mesh, bool across, const at::Tensor& sent, MessageSizes sizes);
  void check_process() {
    calls_.thread_check().check_process();
  }
  // For the child of a fork: later uses of units throw if the model has other ranks.
  void mark_forked();

 private:
  void gather_held(UnitId unit);
  bool is_in_use() const;
  void begin_inner_step();
  void end_inner_step();
  std::vector<UnitId> in_forward_order(const std::vector<UnitId>& units) const;
  bool gather_behind_step();

  Resources resources_;
  const UnitContext& context_; // of the model's own mesh
  bool started_ = false;
  Units units_;
  Offload offload_;
  Schedule schedule_;
  Reducer reducer_;
  UnitLifecycle lifecycle_;
  OrderConsensus consensus_;
  ModelCalls calls_;
};

} // namespace zerocore
