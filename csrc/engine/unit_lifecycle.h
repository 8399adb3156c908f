// Units as the calls, the backward and the optimizer use them: carries out the schedule's actions,
// shows parameters in modules, and takes note of what the user changes.
//
// Note [Gathers behind a call]
// A gather of weights that come back from the host cannot be issued before they are on their way,
// for which the host waits. A gather ahead of its use in a forward is therefore issued when the
// device has been given the work of the running call: with the next call, or when this one ends.
// Whether the weights are there is not asked, as ranks must issue collectives in one order. On the
// CPU nothing computes behind the host, so there it would only come late.
//
// Note [Gathers behind a step]
// Where full parameters stay, an optimizer's step has changed this rank's part of them. The gathers
// of the other parts begin when the step ends, on all ranks, so that later reads and forwards ask
// no rank; they wait for the units that they use. A unit is gathered when optimizers have updated
// all of its trained parameters: several that share a unit cost one gather. Other changes are
// gathered by the forward, and so are updates on the host, which go on behind the step, and those
// of a step inside of a call, where ranks may be at different units.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/gradients/reducer.h"
#include "engine/offload/offload.h"
#include "engine/trainable_params.h"
#include "engine/unit/unit.h"
#include "engine/write_check.h"
#include "plan/schedule.h"

namespace zerocore {

// Shows a unit's parameters to programs: the full ones, or shards. Called from any thread.
using ShowParams = std::function<void(UnitId unit, bool full)>;

// A unit that an optimizer updates, and which parameters in it; none for all that are trained.
struct UpdatedUnit {
  UnitId unit = -1;
  std::optional<std::vector<int>> params;
};

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
        write_check_(units, context),
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
  // See Engine::hold_unsharded. All of the units, or none where it throws.
  void hold_unsharded(const std::vector<UnitId>& units);
  // Returns the names of parameters that were changed, if they are not written back.
  std::vector<std::string> release_unsharded(const std::vector<UnitId>& units, bool write_back);
  bool holds_any() const {
    return std::ranges::any_of(
        units_, [this](const auto& unit) { return schedule_.is_held_unsharded(unit->id()); });
  }
  void begin_hold(UnitId unit);
  void wait_held(UnitId unit);
  // See Engine::set_kept. The modules show a unit that is kept once use() has waited for it.
  void set_kept(UnitId unit, bool kept);
  void set_staying(UnitId unit, Staying staying) {
    schedule_.residency().set_staying(unit, staying);
  }
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
  // Takes note of changed shards. True if there are: call order_gathers() before the next gather.
  bool refresh(UnitId unit);
  void order_gathers();
  // A backward begins: units whose shards have changed by themselves are gathered again when they
  // are used.
  void take_changes();
  // The same of a unit that is there and is to be used now.
  void catch_up(UnitId unit);
  TrainableParams& trainable() {
    return trainable_;
  }
  // The unit's parameters may have been changed in place: a call of it ends, or it is given back.
  void keep_writes(UnitId unit);
  // See Note [Writes in a forward]; the first where all ranks have left the pass, whose writes the
  // second drops.
  void finish_writes();
  void drop_writes();
  WriteCheck& write_check() {
    return write_check_;
  }
  // Throws if a shard has left its place in memory.
  void check_homes(UnitId unit) const;
  // Nothing runs any more, whatever was under way.
  void settle();
  // A backward goes through the model: units gather at once, requires_grad stays as it is.
  bool in_backward_pass() const {
    return in_backward_pass_;
  }
  void set_in_backward_pass(bool in_backward_pass) {
    in_backward_pass_ = in_backward_pass;
  }

  // Around an optimizer's step inside of a call, or of a hold, on all ranks. First what calls under
  // way have gathered has arrived, and what they have changed in place is in the shards. After it
  // units that changed are stale: those in use are gathered again at once, others when they are
  // entered.
  void begin_inner_step();
  void end_inner_step();

  // See Engine.
  void begin_update(const std::vector<UnitId>& units, bool casts);
  void end_update(const std::vector<UpdatedUnit>& units, bool casts);
  // Units whose gathers begin behind the step that has ended, and what begins these; on all ranks.
  // See Note [Gathers behind a step].
  std::vector<UnitId> updated_units() const;
  void gather_updated(const std::vector<UnitId>& units);
  // Waits for gathers under way, which read shards that are about to change. A unit whose gather
  // fails is gathered again at its next use.
  void finish_gathers();

 private:
  void carry_out();
  void show(UnitId unit, bool full);
  void take_change(UnitId unit);
  bool take_behind(Unit& unit);
  void wait_for(UnitId unit);
  bool gathers_later() const;
  void gather_late(std::optional<UnitId> last = std::nullopt);
  std::vector<UnitId> in_forward_order(const std::vector<UnitId>& units) const;

  const Units& units_;
  const UnitContext& context_;
  Schedule& schedule_;
  Offload& offload_;
  Reducer& reducer_;
  TrainableParams trainable_;
  WriteCheck write_check_;
  ShowParams show_params_;
  Actions actions_; // not carried out yet; reused
  bool in_backward_pass_ = false;
  bool hides_ = false;
  std::vector<bool> full_shown_; // by unit
  std::vector<UnitId> late_; // to be gathered; see Note [Gathers behind a call]
};

} // namespace zerocore
