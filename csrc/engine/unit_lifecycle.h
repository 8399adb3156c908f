// Carries out the schedule's actions on units, shows their parameters in modules, and notices the
// user's changes to them.
//
// Note [Delayed prefetch]
// To all-gather offloaded weights the host must first wait for their update. So a forward issues a
// prefetch after the running call has queued its kernels: at the next call, or at the end of this
// one. The delay does not depend on whether the weights are ready, because all ranks must issue
// collectives in one order. A CPU has no queue of kernels and would gain nothing.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "engine/gradients/reducer.h"
#include "engine/in_place_writes.h"
#include "engine/offload/offload.h"
#include "engine/trainable_params.h"
#include "engine/unit/unit.h"
#include "plan/schedule.h"

namespace zerocore {

// Puts a unit's full parameters, or its shards, into the user's modules. Thread-safe.
using ShowParams = std::function<void(UnitId unit, bool full)>;

// The state of all units of a model: gathered or not, shown or not, changed or not.
class UnitLifecycle {
 public:
  // All arguments but the function must outlive the object.
  UnitLifecycle(
      const Units& units,
      const UnitContext& context,
      Schedule& schedule,
      Offload& offload,
      Reducer& reducer,
      ShowParams show_params)
      : units_(units),
        context_(context),
        schedule_(schedule),
        offload_(offload),
        reducer_(reducer),
        trainable_(units, schedule, context.alarm),
        writes_(units, context, schedule),
        show_params_(std::move(show_params)),
        full_shown_(units.size()) {}

  // See Engine::start.
  void start(bool consistent, TrainableParams::OnGradient on_gradient);
  // Runs `decide`, which asks the schedule for actions, and carries them out.
  template <typename Decide>
  void run(const Decide& decide) {
    decide(actions_);
    carry_out();
  }
  // Makes the compute stream wait for the unit's all-gather, and shows its full parameters.
  void use(UnitId unit);
  // Waits like use(), without showing the parameters in modules.
  void wait_for(UnitId unit);
  // Issues the delayed all-gathers, see Note [Delayed prefetch]. With `last`, stops after that
  // unit, and issues none if that unit is not delayed.
  void gather_delayed(std::optional<UnitId> last = std::nullopt);
  // Shows the unit's full parameters or its shards, as the schedule says.
  void update_registration(UnitId unit);
  // While hiding, all units show shards, even within calls: for an optimizer's step and for
  // state_dict(). The next call of a unit stops the hiding.
  void set_hiding(bool hides);
  bool is_hiding() const {
    return hides_;
  }
  // Stops the hiding; each unit shows the right parameters from its next use on.
  void stop_hiding() {
    hides_ = false;
  }
  // Shows the shards of all inactive units, even of units that stay unsharded for a backward pass:
  // call it if the forward recorded no graph.
  void hide_unused();
  // Notices changed shards before a unit is gathered. refresh_all() does so for all units when a
  // pass begins, and returns the units that will be gathered again.
  void refresh(UnitId unit);
  std::vector<UnitId> refresh_all();
  // Marks the gathered parameters as stale after a change of the unit's shards. Call
  // order_gathers() before the next all-gather.
  void invalidate(UnitId unit);
  // Makes later all-gathers wait for the compute stream, which has written the shards.
  void order_gathers();
  // When a backward begins: marks units as stale whose shards were written directly.
  void invalidate_changed();
  // Gathers a unit in use again if its shards were written directly.
  void regather_changed(UnitId unit);
  TrainableParams& trainable() {
    return trainable_;
  }
  InPlaceWrites& writes() {
    return writes_;
  }
  // Throws c10::ValueError if a shard no longer lies in the unit's memory.
  void check_homes(UnitId unit) const;
  // Aborts all unfinished work and brings each unit into its idle state.
  void reset();
  // Returns whether a backward pass runs through the model. During it, all-gathers are not delayed
  // and requires_grad is not synchronised.
  bool in_backward_pass() const {
    return in_backward_pass_;
  }
  void set_in_backward_pass(bool in_backward_pass) {
    in_backward_pass_ = in_backward_pass;
  }

 private:
  void carry_out();
  void gather(UnitId unit);
  void show(UnitId unit, bool full);
  bool refresh_one(UnitId unit);
  bool gathers_later() const;

  const Units& units_;
  const UnitContext& context_;
  Schedule& schedule_;
  Offload& offload_;
  Reducer& reducer_;
  TrainableParams trainable_;
  InPlaceWrites writes_;
  ShowParams show_params_;
  Actions actions_; // actions to carry out; the memory is reused
  bool in_backward_pass_ = false;
  bool hides_ = false;
  std::vector<bool> full_shown_; // by unit: the modules hold full parameters
  std::deque<UnitId> delayed_; // delayed all-gathers; see Note [Delayed prefetch]
};

} // namespace zerocore
