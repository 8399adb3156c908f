// The one object Python holds: follows the calls of the model and of its units.
//
// Calls come from one thread at a time (backward may run on another one); others get an error.
// enter/exit bracket a module call; begin_pass/end_pass bracket a call of the sharded model.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "engine/backward_run.h"
#include "engine/exchange.h"
#include "engine/first_gather.h"
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
      std::vector<CallEvent> order,
      std::unique_ptr<Registrar> registrar);
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
  const std::vector<HandOver>& hand_overs() const {
    return resources_.hand_overs().entries();
  }

  // All parameters are materialized and bound. `consistent`: all ranks hold the same values.
  void start(bool consistent);

  // -- forward
  void begin_pass();
  void end_pass(const std::vector<at::Tensor>& outputs);
  void fail_pass();
  void enter(UnitId unit);
  // `keep`: see Schedule::exit.
  void exit(UnitId unit, const std::vector<at::Tensor>& outputs, bool keep = false);
  // A parameter of a unit that was not entered is read: the innermost call that runs owns
  // the unit from here to its end.
  void adopt(UnitId unit);
  bool in_call() const {
    return !calls_.empty();
  }

  // -- between steps
  // Unshards the units and shows their full parameters until release_unsharded.
  void hold_unsharded(const std::vector<UnitId>& units);
  void release_unsharded(const std::vector<UnitId>& units, bool write_back) {
    lifecycle_.release_unsharded(units, write_back);
  }
  // Unshards the unit ahead of its next forward, or reshards it if nothing uses it. On all ranks.
  void set_kept(UnitId unit, bool kept);
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
  // The first throws if a shard has left its place in memory.
  void begin_update(const std::vector<UnitId>& units, bool casts);
  void end_update(const std::vector<UpdatedUnit>& units, bool casts);
  // Weights are going to change on all ranks, or units to be used outside of passes.
  void drop_first_gather() {
    first_gather_.drop();
  }
  // For an optimizer of whole matrices, on all ranks: which flags any has set.
  std::vector<bool> any_rank(const std::vector<bool>& flags);
  // The same: an all-to-all `across` the ranks that hold the same shards, else over those that
  // share them. The engine outlives it.
  Exchange exchange(bool across, const at::Tensor& sent, MessageSizes sizes);
  // The call of a backward ended with an exception: as reset() if it came through this model.
  void fail_backward();
  // Drops everything in flight: gathers, graphs waiting for a backward, unreduced gradients.
  void reset();
  void check_process() const {
    thread_check_.check_process();
  }
  // In the child of a fork: from now on each use of units throws if there are other ranks.
  void mark_forked();

 private:
  struct Call {
    bool recomputing = false; // in a recompute, not a forward
    uint64_t first_node = 0; // of the graph that the call records
    bool has_graph = false; // grad mode was on at its beginning
    UnitId adopted = -1; // the unit, if it is left with the call that is around this one
    CallHandle again = {}; // that a recompute makes once more; of pass -1 if it is not known
  };

  void recover();
  void leave_if_outside();
  void recompute(UnitId unit);
  void leave_adopted(const std::vector<at::Tensor>& outputs);
  void leave(UnitId unit, const std::vector<at::Tensor>& outputs, bool keep);
  void leave_forward(RecordedCall& recorded, bool has_output, bool reads, bool keep);
  int64_t note_call(const RecordedCall& recorded, const Call& entered);
  Call pop_call();

  Resources resources_;
  const UnitContext& context_; // of the resources
  Units units_;
  Offload offload_;
  Schedule schedule_;
  Reducer reducer_;
  ThreadCheck thread_check_;
  UnitLifecycle lifecycle_;
  FirstGather first_gather_;
  OrderConsensus consensus_;
  BackwardRun backward_run_;
  std::vector<Call> calls_; // entered and not left
  std::exception_ptr refused_; // a call has left its parameters in no order; its end raises it
};

} // namespace zerocore
