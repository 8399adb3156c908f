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
#include "engine/engine_parts.h"
#include "engine/first_gather.h"
#include "engine/order_consensus.h"
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

  // For work that is neither a call nor a step of the engine.
  EngineParts& parts() {
    return parts_;
  }
  Unit& unit(UnitId id) {
    return *parts_.units.at(id);
  }
  UnitId num_units() const {
    return parts_.num_units();
  }
  Reducer& reducer() {
    return parts_.reducer;
  }
  const Schedule& schedule() const {
    return parts_.schedule;
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
  // Sets and reads a unit's parameters; collective. See Unit.
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
  // The call of a backward ended with an exception: as reset() if it came through this model.
  void fail_backward();
  // Drops everything in flight: gathers, graphs waiting for a backward, unreduced gradients.
  void reset();
  void check_process() const {
    parts_.thread_check.check_process();
  }

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
  CallHandle recompute(UnitId unit);
  void leave_adopted(const std::vector<at::Tensor>& outputs);
  void leave(UnitId unit, const std::vector<at::Tensor>& outputs, bool keep);
  void leave_forward(RecordedCall& recorded, bool has_output, bool reads, bool keep);
  int64_t note_call(const RecordedCall& recorded, const Call& entered);
  Call pop_call();

  EngineParts parts_;
  UnitLifecycle lifecycle_;
  FirstGather first_gather_;
  OrderConsensus consensus_;
  BackwardRun backward_run_;
  std::vector<Call> calls_; // entered and not left
  std::exception_ptr refused_; // a call has left its parameters in no order; its end raises it
};

} // namespace zerocore
