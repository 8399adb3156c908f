// Units as calls, backwards and optimizers use them: carries out the schedule's actions, shows
// parameters in modules, and takes note of what the user changes.
//
// Note [Gathers behind a call]
// A gather of weights that come back from the host cannot be issued before they are on their way,
// for which the host waits. A gather ahead of its use in a forward is therefore issued when the
// device has been given the work of the running call: with the next call, or when this one ends.
// Whether the weights are there is not asked, as ranks must issue collectives in one order. On the
// CPU nothing computes behind the host, so there it would only come late.
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

// Shows a unit's parameters to programs: the full ones, or shards. Called from any thread.
using ShowParams = std::function<void(UnitId unit, bool full)>;

class UnitLifecycle {
 public:
  // All but the function outlive it.
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
  // Carries out the actions that `decide` gets from the schedule.
  template <typename Decide>
  void run(const Decide& decide) {
    decide(actions_);
    carry_out();
  }
  // The compute stream works with the unit's full parameters from here on.
  void use(UnitId unit);
  // The same without showing it to modules.
  void wait_for(UnitId unit);
  // Issues the gathers that wait for the next call, see Note [Gathers behind a call]; up to a unit,
  // if it is among them.
  void gather_late(std::optional<UnitId> last = std::nullopt);
  // Shows what the schedule says: the unit's full parameters or its shards.
  void update_registration(UnitId unit);
  // While it hides, all units show shards, also within calls: for an optimizer's step and for
  // state_dict(). The next call of a unit stops the hiding.
  void set_hiding(bool hides);
  bool is_hiding() const {
    return hides_;
  }
  // Units show what they have to when they are used next.
  void stop_hiding() {
    hides_ = false;
  }
  // Units that stay for a backward show shards, too: no backward comes.
  void hide_unused();
  // Before the unit, or any, is gathered: takes note of changed shards. The second is for the
  // beginning of a pass, and returns the units that are going to be gathered again.
  void refresh(UnitId unit);
  std::vector<UnitId> refresh_all();
  // The unit's shards have changed: what was gathered is stale. The next gather has to be behind
  // order_gathers().
  void invalidate(UnitId unit);
  void order_gathers();
  // A backward begins: units whose shards have changed by themselves are gathered again when they
  // are used. The second gathers one that is unsharded already.
  void invalidate_changed();
  void regather_changed(UnitId unit);
  TrainableParams& trainable() {
    return trainable_;
  }
  InPlaceWrites& writes() {
    return writes_;
  }
  // Throws if a shard has left its place in memory.
  void check_homes(UnitId unit) const;
  // Nothing runs any more, whatever was under way.
  void reset();
  // A backward goes through the model: units gather at once, requires_grad stays as it is.
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
  Actions actions_; // not carried out yet; reused
  bool in_backward_pass_ = false;
  bool hides_ = false;
  std::vector<bool> full_shown_; // by unit
  std::deque<UnitId> late_; // to be gathered; see Note [Gathers behind a call]
};

} // namespace zerocore
