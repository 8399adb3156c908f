// The one object that Python holds: owns the parts, and does the work between steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "engine/backward_run.h"
#include "engine/exchange.h"
#include "engine/model_calls.h"
#include "engine/order_consensus.h"
#include "engine/resources.h"
#include "engine/thread_check.h"
#include "engine/unit_lifecycle.h"

namespace zerocore {

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // `order` is the expected order of calls.
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

  // All parameters are materialized and bound. `consistent`: all ranks hold the same values.
  void start(bool consistent);

  // Unshards the units and shows their full parameters until UnitLifecycle::release_unsharded.
  void hold_unsharded(const std::vector<UnitId>& units);
  // The same of one unit, which modules do not show: begins its gather, behind which
  // UnitLifecycle::wait_held orders the compute stream. Also of a unit whose memory is back while
  // the model is parked.
  void begin_hold(UnitId unit);
  // Unshards the unit ahead of its next forward, or reshards it if nothing uses it. On all ranks.
  void set_kept(UnitId unit, bool kept);
  // Waits for the host, brings what gathers read up to date and frees the pool's arena: from here
  // on the memory that units keep on the device may go, and what would read it throws, until
  // `parked` is false. On all ranks.
  void set_parked(bool parked);
  // Bytes of a unit that stay on the device between steps: parameters first, then what only
  // optimizers and reductions use.
  std::vector<at::Tensor> device_memory(UnitId unit) const;
  // Gives the storage of a tensor on the device memory again where it had it, not initialised.
  void take_memory(const at::Tensor& tensor) {
    give_memory(tensor, context_.memory_for(tensor));
  }
  UnitLifecycle& lifecycle() {
    return lifecycle_;
  }
  Agreed agreed() const {
    return consensus_.agreed(backward_run_.num_shapes());
  }
  // Sets and reads a unit's parameters; collective. Waits for updates. See Unit.
  void materialize(UnitId unit, const std::vector<at::Tensor>& full, bool broadcast);
  std::vector<at::Tensor> full_values(UnitId unit);
  // Around an optimizer's update of main weights, which `casts` if it writes the model weights too.
  // The first throws if a shard has left its place in memory. Inside of a call, see
  // UnitLifecycle::end_inner_step. The second is true if gathers have begun, which read the shards
  // until UnitLifecycle::finish_gathers or the next use of their units.
  void begin_update(const std::vector<UnitId>& units, bool casts);
  bool end_update(const std::vector<UpdatedUnit>& units, bool casts);
  // Reduces gradients that backwards without sync have held back. On all ranks.
  void finalize_backward();
  // From here on nothing is reduced, and units that are gathered stay.
  void begin_deferred();
  // Units come and go again. Unless all is dropped, finalizes the backward.
  void end_deferred(bool drops);
  // For an optimizer of whole matrices, on all ranks: which flags any has set.
  std::vector<bool> any_rank(const std::vector<bool>& flags);
  // The same, on all ranks of a mesh: an all-to-all `across` those that hold the same shards, else
  // over those that share them. The engine outlives it.
  Exchange exchange(size_t mesh, bool across, const at::Tensor& sent, MessageSizes sizes);
  void check_process() const {
    thread_check_.check_process();
  }
  // In the child of a fork: from now on each use of units throws if there are other ranks.
  void mark_forked();

 private:
  bool gather_behind_step();

  Resources resources_;
  const UnitContext& context_; // of the resources
  bool started_ = false;
  Units units_;
  Offload offload_;
  Schedule schedule_;
  Reducer reducer_;
  ThreadCheck thread_check_;
  UnitLifecycle lifecycle_;
  OrderConsensus consensus_;
  BackwardRun backward_run_;
  ModelCalls calls_;
};

} // namespace zerocore
