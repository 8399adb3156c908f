// The one object that Python holds: owns the parts, and does the work between passes.
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

// Stands for a unit's name in collectives of an optimizer.
inline const std::string kOptimizer = "optimizer";

// An all-to-all under way, of an optimizer of whole matrices. The context outlives it.
class Exchange {
 public:
  // Sends each rank of the group its part of `sent` (1-D, rank after rank). `sizes` are bytes.
  Exchange(
      const UnitContext& context,
      Collectives& group,
      const at::Tensor& sent,
      MessageSizes sizes);

  // The received tensor, for work of the compute stream from here on; blocks on the CPU.
  at::Tensor wait();

 private:
  const Streams& streams_;
  at::Tensor received_; // 1-D, of the dtype that was sent
  PendingCollective pending_;
};

// Note [Gathers behind a step]
// Where full parameters stay, an optimizer's step has changed this rank's part of them. The gathers
// of the other parts begin when the step ends, on all ranks, so that later reads and forwards ask
// no rank; they wait for the units that they use. A unit is gathered when optimizers have updated
// all of its trained parameters: several that share a unit cost one gather. Other changes are
// gathered by the forward, and so are updates on the host, which go on behind the step, and those
// of a step inside of a call, where ranks may be at different units.

// A unit that an optimizer updates, and which parameters in it; none for all that are trained.
struct UpdatedUnit {
  UnitId unit = -1;
  std::optional<std::vector<int>> params;
};

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

  // Unshards the units and shows their full parameters until release_unsharded: all, or none where
  // it throws.
  void hold_unsharded(const std::vector<UnitId>& units);
  // Returns the names of parameters that were changed, if they are not written back.
  std::vector<std::string> release_unsharded(const std::vector<UnitId>& units, bool write_back);
  // As hold_unsharded of one unit, which modules do not show: begins its gather, behind which
  // wait_held orders the compute stream. Also of a unit whose memory is back while the model is
  // parked.
  void begin_hold(UnitId unit);
  void wait_held(UnitId unit);
  // Unshards the unit ahead of its next forward; modules show it once UnitLifecycle::use has waited
  // for it. Reshards it if nothing uses it. On all ranks.
  void unshard(UnitId unit);
  void reshard(UnitId unit);
  void set_staying(UnitId unit, Staying staying) {
    schedule_.residency().set_staying(unit, staying);
  }
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
    return consensus_.agreed(calls_.num_backward_shapes());
  }
  // Sets and reads a unit's parameters; collective. Waits for updates. See Unit.
  void materialize(UnitId unit, const std::vector<at::Tensor>& full, bool broadcast);
  std::vector<at::Tensor> full_values(UnitId unit);
  // Around an optimizer's update of main weights, which `casts` if it writes the model weights too.
  // The first throws if a shard has left its place in memory. The second is true if gathers have
  // begun, which read the shards until finish_gathers or the next use of their units.
  void begin_update(const std::vector<UnitId>& units, bool casts);
  bool end_update(const std::vector<UpdatedUnit>& units, bool casts);
  // Waits for gathers under way, which read shards that are about to change. A unit whose gather
  // fails is gathered again at its next use.
  void finish_gathers();
  // From here on nothing is reduced, and units that are gathered stay.
  void begin_deferred();
  // Units come and go again. Unless all is dropped, finalizes the backward.
  void end_deferred(bool drops);
  // For an optimizer of whole matrices, on all ranks: which flags any has set.
  std::vector<bool> any_rank(const std::vector<bool>& flags);
  // The same, on all ranks of a mesh: an all-to-all `across` those that hold the same shards, else
  // over those that share them. The engine outlives it.
  Exchange exchange(size_t mesh, bool across, const at::Tensor& sent, MessageSizes sizes);
  void check_process() {
    calls_.thread_check().check_process();
  }
  // In the child of a fork: from now on each use of units throws if there are other ranks.
  void mark_forked();

 private:
  void gather_held(UnitId unit);
  bool is_in_use() const;
  void begin_inner_step();
  void end_inner_step();
  std::vector<UnitId> in_forward_order(const std::vector<UnitId>& units) const;
  bool gather_behind_step();

  Resources resources_;
  const UnitContext& context_; // of the resources
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
