// Carries out the schedule's actions on units, shows their parameters in modules, and notices
// changes that the user makes to them.
//
// Note [Delayed prefetch]
// To all-gather offloaded weights the host must first wait for their update. A prefetch in a
// forward is therefore issued after the running call has queued its kernels: at the next call, or
// when this one ends. The delay does not depend on whether the weights are ready, because all ranks
// must issue collectives in one order. A CPU has no queue of kernels and would gain nothing.
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

// Puts a unit's full parameters, or its shards, into the user's modules. Called from any thread.
using ShowParams = std::function<void(UnitId unit, bool full)>;

// The state of all units of a model: gathered or not, shown to the user or not, changed or not.
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
  // The same, but does not show the parameters in modules.
  void wait_for(UnitId unit);
  // Issues the delayed all-gathers, see Note [Delayed prefetch]. With `last` it stops after that
  // unit, and issues none if that unit is not among them.
  void gather_late(std::optional<UnitId> last = std::nullopt);
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
  // the forward recorded no graph, so no backward pass comes.
  void hide_unused();
  // Notices changed shards before a unit is gathered. refresh_all() does so for all units when a
  // pass begins, and returns the units that will be gathered again.
  void refresh(UnitId unit);
  std::vector<UnitId> refresh_all();
  // Marks the gathered parameters as stale, because the unit's shards have changed. Call
  // order_gathers() before the next all-gather.
  void invalidate(UnitId unit);
  // Makes later all-gathers wait for the compute stream, which has written the shards.
  void order_gathers();
  // When a backward begins, units whose shards were written directly are marked as stale.
  void invalidate_changed();
  // Gathers a unit in use again if its shards were written directly.
  void regather_changed(UnitId unit);
  TrainableParams& trainable() {
    return trainable_;
  }
  InPlaceWrites& writes() {
    return writes_;
  }
  // Throws c10::ValueError if a shard was moved out of the unit's memory.
  void check_homes(UnitId unit) const;
  // Aborts whatever is under way and brings each unit into its idle state.
  void reset();
  // Returns whether a backward pass runs through the model. Then all-gathers are not delayed, and
  // requires_grad is not synchronised.
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
  Actions actions_; // to be carried out; the memory is reused
  bool in_backward_pass_ = false;
  bool hides_ = false;
  std::vector<bool> full_shown_; // by unit: the modules hold full parameters
  std::deque<UnitId> late_; // delayed all-gathers; see Note [Delayed prefetch]
};

} // namespace zerocore
