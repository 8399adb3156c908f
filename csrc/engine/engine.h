// The one object Python holds: wires units, schedule, reducer and autograd.
//
// Calls come from one thread at a time (backward may run on another one); others get an error.
// enter/exit bracket a module call; begin_pass/end_pass bracket a call of the sharded model.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/alarm_setup.h"
#include "engine/engine_options.h"
#include "engine/reducer.h"
#include "engine/side_doors.h"
#include "engine/thread_check.h"
#include "engine/unit.h"
#include "plan/schedule.h"

namespace zerocore {

// A unit that an optimizer updates, and which parameters in it; none for all that are trained.
struct UpdatedUnit {
  UnitId unit = -1;
  std::optional<std::vector<int>> params;
};

// Sizes of all that is kept of what ranks agree on, for tests: none of it grows for ever.
struct Agreed {
  size_t num_calls = 0; // in the order of a pass
  size_t num_shapes = 0; // of backwards
  size_t num_points = 0; // see Note [Known sequences]; of all groups
  uint64_t num_compared = 0; // collectives that ranks compared before they issued them
};

// Writes a unit's parameters into the modules that own them. Called from any thread.
class Registrar {
 public:
  virtual ~Registrar() = default;
  virtual void show(UnitId unit, bool full) = 0;
};

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
  UnitId num_units() const {
    return static_cast<UnitId>(units_.size());
  }
  Reducer& reducer() {
    return reducer_;
  }
  const StagePolicy& policy() const {
    return context_.policy;
  }
  const Schedule& schedule() const {
    return schedule_;
  }
  const PoolStats& pool_stats() const {
    return pool_.stats();
  }
  void forget_recent_peak() {
    pool_.forget_recent_peak();
  }
  const HandOverLog& hand_overs() const {
    return hand_overs_;
  }
  const Streams& streams() const {
    return streams_;
  }
  Trace& trace() {
    return trace_;
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
  // Somebody reads a parameter of a unit that nobody has entered: the innermost call that runs owns
  // the unit from here to its end.
  void adopt(UnitId unit);
  bool in_call() const {
    return !calls_.empty();
  }

  // -- between steps
  void set_sync(bool sync) {
    sync_ = sync;
  }
  bool sync() const {
    return sync_;
  }
  // Unshards the units and shows their full parameters until release_unsharded.
  void hold_unsharded(const std::vector<UnitId>& units);
  void release_unsharded(const std::vector<UnitId>& units, bool write_back);
  // A number for the set of parameters that require grad, as of the units' last uses. The ranks may
  // compare it; those that find a difference call fail_trainable(), which names the parameters.
  uint64_t trainable_hash() const {
    return trainable_;
  }
  [[noreturn]] void fail_trainable();
  Agreed agreed() const;
  // Throws if a shard has left its place in memory.
  void check_homes(UnitId unit) const;
  // Sets and reads a unit's parameters; collective. See Unit.
  void materialize(UnitId unit, const std::vector<at::Tensor>& full, bool broadcast);
  std::vector<at::Tensor> full_values(UnitId unit);
  // Around an optimizer's update of main weights, which `casts` if it writes the model weights too.
  // The first throws if a shard has left its place in memory.
  void begin_update(const std::vector<UnitId>& units, bool casts);
  void end_update(const std::vector<UpdatedUnit>& units, bool casts);
  // The call of a backward ended with an exception: as reset() if it came through this model.
  void fail_backward();
  // Drops everything in flight: gathers, graphs waiting for a backward, unreduced gradients.
  void reset();
  // In the child of a fork: from now on every use of units is an error, where there are peers.
  void mark_forked();
  void check_process() const {
    thread_check_.check_process();
  }

 private:
  struct Call {
    bool recomputing = false; // in a recompute, not a forward
    uint64_t first_node = 0; // of the graph that the call records
    UnitId adopted = -1; // the unit, if it is left with the call that is around this one
  };

  void begin_backward();
  void end_backward();
  void pre_backward(const RecordedCall& recorded, int64_t number);
  void enter_by_side_door(const RecordedCall& recorded) noexcept;
  void check_versions(const RecordedCall& recorded);
  void mute_units();
  void reduce_rest();
  void check_rest(const std::vector<bool>& rest, bool is_unexpected) const;
  void run_user_hooks(const std::vector<bool>& reduced);
  void grad_ready(UnitId unit, int param);
  void forget_fired(UnitId unit);
  bool is_done(UnitId unit) const;
  void throw_side_door_error();
  void recover();
  void leave_if_outside();
  void leave_adopted(const std::vector<at::Tensor>& outputs);
  void leave(UnitId unit, const std::vector<at::Tensor>& outputs, bool keep);
  void keep_writes(UnitId unit);
  void expect_step();
  Call pop_call();
  void run(Actions& actions);
  void settle();
  void use(UnitId unit);
  void update_registration(UnitId unit);
  void sync_requires_grad(UnitId unit);
  void note_trainable(UnitId unit);
  bool refresh(UnitId unit);
  void order_gathers();
  bool is_alone() const;
  void ask_for(UnitId unit);
  void ask_in_backward(const CallHandle& call);
  void serve_others();
  void leave_pass();
  void settle_pass();

  struct UnitProgress {
    bool full_shown = false;
    int num_trainable = 0;
    uint64_t trainable = 0; // a hash of which parameters require grad
    int num_fired = 0;
    int64_t backward = -1; // the one that goes through the unit
    std::vector<uint8_t> fired;
    std::vector<uint8_t> outdated; // changed since the forward; empty if none is
  };

  EngineOptions options_;
  HandOverLog hand_overs_;
  Streams streams_;
  BucketPool pool_;
  Trace trace_;
  ModelAlarm alarm_;
  std::unique_ptr<Collectives> collectives_, replicas_;
  std::unique_ptr<Peers> peers_;
  UnitContext context_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<UnitProgress> progress_;
  Schedule schedule_;
  Reducer reducer_;
  std::unique_ptr<Registrar> registrar_;
  std::vector<Call> calls_; // entered and not left
  Actions actions_; // reused
  ThreadCheck thread_check_;
  SideDoors side_doors_;
  std::exception_ptr side_door_error_; // thrown at the next chance
  bool backward_ = false;
  bool muted_ = false; // some unit is
  std::unordered_map<uint64_t, bool> rest_by_shape_; // see reduce_rest()
  bool sync_ = true;
  bool leaving_ = false; // a pass that other ranks may still be in
  std::optional<int> failed_; // a rank whose forward has raised in this pass
  bool ranks_differ_ = false; // they took different ways in passes since the last backward
  uint64_t trainable_ = 0;
};

} // namespace zerocore
