// The forward half of the schedule, and the moves both halves share.
#include "plan/schedule.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

namespace zerocore {

namespace {

// More forwards than any backward reaches back; without it, forwards that record graphs which
// nobody wants would pile up.
constexpr size_t kMaxPasses = 4096;

} // namespace

ScheduleOptions schedule_options(
    int num_units,
    const ShardOptions& sharding,
    const StagePolicy& policy) {
  return {num_units, sharding.prefetch, policy.shards_optimizer(), policy.shards_parameters()};
}

Schedule::Schedule(ScheduleOptions options, std::vector<CallEvent> order)
    : options_(options), order_(std::move(order)), units_(options.num_units) {
  for (UnitState& unit : units_) {
    unit.resident = !options_.gathers || !options_.releases;
  }
}

// -- passes ---------------------------------------------------------------------------------

// The last ones are asked for most.
Schedule::Pass* Schedule::find_pass(int64_t id) {
  const auto found =
      std::find_if(passes_.rbegin(), passes_.rend(), [&](const Pass& p) { return p.id == id; });
  return found == passes_.rend() ? nullptr : &*found;
}

const Schedule::Pass* Schedule::find_pass(int64_t id) const {
  return const_cast<Schedule*>(this)->find_pass(id);
}

Schedule::Pass& Schedule::open_pass(bool grad) {
  forget_old_passes();
  Pass& pass = passes_.emplace_back();
  pass.id = next_pass_++;
  pass.grad = grad;
  open_ = pass.id;
  return pass;
}

void Schedule::forget_old_passes() {
  if (std::exchange(outdated_, false)) {
    std::erase_if(passes_, [&](const Pass& pass) { return is_outdated(pass); });
  }
  if (passes_.size() >= kMaxPasses) {
    passes_.pop_front();
  }
}

// Whether no backward can come through the pass: everything it would train has changed.
bool Schedule::is_outdated(const Pass& pass) const {
  return std::all_of(pass.events.begin(), pass.events.end(), [&](const CallEvent& event) {
    const UnitState& unit = units_[event.unit];
    return event.kind == EventKind::Enter || !event.needs_backward || !unit.reducible ||
        unit.changed_at > pass.id;
  });
}

void Schedule::close_loose_pass() {
  if (!rooted_) {
    open_ = -1;
  }
}

// Ranks go through a pass together where it has a backward or where units have to be gathered.
void Schedule::begin_pass(bool grad, Actions& out) {
  close_loose_pass();
  open_pass(grad);
  rooted_ = true;
  retained_ = -1;
  follows_ = grad || std::any_of(units_.begin(), units_.end(), [](const UnitState& unit) {
               return !unit.resident;
             });
  if (follows_) {
    order_.begin(grad);
    if (options_.releases) {
      reshard_all_but(order_.upcoming(1 + options_.prefetch), out);
    }
  }
}

void Schedule::end_pass(Actions& out) {
  close_pass(out);
  settle_pass(changed() ? std::vector<PassCalls>{calls()} : std::vector<PassCalls>{}, 0);
}

void Schedule::close_pass(Actions& out) {
  if (follows_) {
    finish_order(out);
  }
  rooted_ = false;
  closed_ = std::exchange(open_, -1);
}

void Schedule::settle_pass(const std::vector<PassCalls>& ranks, int own) {
  Pass& pass = *find_pass(std::exchange(closed_, -1));
  if (std::exchange(follows_, false)) {
    pass.events = ranks.empty() ? order_.events() : order_.learn(ranks, own);
  }
  const bool wanted = std::any_of(pass.events.begin(), pass.events.end(), [](const auto& event) {
    return event.kind == EventKind::Exit && event.needs_backward;
  });
  if (!pass.grad || !wanted) {
    std::erase_if(passes_, [&](const Pass& other) { return &other == &pass; });
  }
}

void Schedule::drop_pass() {
  std::erase_if(passes_, [&](const Pass& pass) { return pass.id == closed_; });
  closed_ = -1;
  follows_ = false;
}

void Schedule::abort(Actions& out) {
  frames_.clear();
  for (UnitId id = 0; id < options_.num_units; ++id) {
    UnitState& unit = units_[id];
    if (std::exchange(unit.late, false)) {
      out.push_back({ActionKind::Reshard, id});
    }
    unit.active = 0;
    unit.held = 0;
    unit.in_backward = false;
    unit.ready = false;
    unit.due = false;
  }
  passes_.clear();
  rooted_ = false;
  follows_ = false;
  open_ = -1;
  closed_ = -1;
  backward_ = -1;
  retained_ = -1;
  if (options_.releases) {
    reshard_all_but({}, out);
  }
}

// -- calls ----------------------------------------------------------------------------------

void Schedule::enter(UnitId unit, bool grad, Actions& out) {
  Frame frame{unit};
  frame.follows = rooted_ && follows_;
  if (!rooted_ && grad && open_ < 0) {
    open_pass(grad);
  }
  if (frame.follows) {
    frame.pass = open_;
    frame.call = enter_in_order(unit, out);
  } else {
    if (Pass* pass = grad ? find_pass(open_) : nullptr) {
      frame.pass = pass->id;
      frame.call = pass->num_calls++;
      pass->events.push_back({EventKind::Enter, unit, true, frame.call});
    }
    do_enter(unit, out);
  }
  ++units_[unit].held;
  frames_.push_back(frame);
}

int32_t Schedule::enter_in_order(UnitId unit, Actions& out) {
  std::optional<int32_t> call = order_.find(unit);
  if (call) {
    go_to(*call, out);
  } else {
    finish_order(out);
    call = order_.add(unit);
    ++units_[unit].held; // by the call that is made
    serve_one(unit, out);
    --units_[unit].held;
  }
  order_.enter(*call);
  return *call;
}

CallHandle Schedule::exit(UnitId unit, bool needs_backward, Actions& out, bool keep) {
  TORCH_INTERNAL_ASSERT(!frames_.empty() && frames_.back().unit == unit, "unbalanced exit");
  const Frame frame = frames_.back();
  frames_.pop_back();
  UnitState& state = units_[unit];
  --state.held;
  if (frame.follows) {
    order_.leave(frame.call, needs_backward);
    leave_calls(out);
    if (state.late && state.held == 0) {
      state.late = false;
      out.push_back({ActionKind::Reshard, unit});
    }
  } else {
    Pass* pass = frame.pass >= 0 ? find_pass(frame.pass) : nullptr;
    if (pass != nullptr) {
      pass->events.push_back({EventKind::Exit, unit, needs_backward, frame.call});
    }
    --state.active;
    if (options_.releases && (!keep || rooted_)) {
      reshard(unit, out);
    }
  }
  return {frame.pass, frame.call, unit};
}

void Schedule::serve(UnitId unit, Actions& out) {
  order_.add(unit);
  serve_one(unit, out);
}

// A rank that uses the unit, because it asked for it before, gathers it anew and keeps it.
void Schedule::serve_one(UnitId unit, Actions& out) {
  UnitState& state = units_[unit];
  unshard(unit, out);
  if (options_.releases && state.active == 0 && state.pinned == 0) {
    state.resident = false;
    state.late = state.held > 0 || state.in_backward;
    if (!state.late) {
      out.push_back({ActionKind::Reshard, unit});
    }
  }
}

void Schedule::finish_order(Actions& out) {
  while (const CallEvent* event = order_.next()) {
    go_through(*event, out);
  }
}

void Schedule::go_to(int32_t call, Actions& out) {
  bool there = false;
  while (!there) {
    const CallEvent& event = *order_.next();
    there = event.kind == EventKind::Enter && event.call == call;
    go_through(event, out);
  }
}

// Goes through the exits that come next, but for those of calls that this rank is in.
void Schedule::leave_calls(Actions& out) {
  for (const CallEvent* event = order_.next(); event != nullptr; event = order_.next()) {
    const bool is_open = std::any_of(frames_.begin(), frames_.end(), [&](const Frame& frame) {
      return frame.follows && frame.call == event->call;
    });
    if (event->kind == EventKind::Enter || is_open) {
      return;
    }
    go_through(*event, out);
  }
}

void Schedule::go_through(const CallEvent& event, Actions& out) {
  order_.advance();
  if (event.kind == EventKind::Enter) {
    do_enter(event.unit, out);
  } else {
    do_exit(event.unit, event.needs_backward, out);
  }
  if (options_.releases && order_.next() == nullptr) {
    reshard_all_but({retained_}, out);
  }
}

void Schedule::do_enter(UnitId unit, Actions& out) {
  ++units_[unit].active;
  if (!options_.gathers) {
    return;
  }
  const bool in_order = rooted_ && follows_;
  const auto next = in_order ? order_.upcoming(options_.prefetch) : std::vector<UnitId>{};
  if (options_.releases) {
    reshard_all_but(next, out);
  }
  unshard(unit, out);
  for (const UnitId ahead : next) {
    unshard(ahead, out);
  }
}

void Schedule::do_exit(UnitId unit, bool needs_backward, Actions& out) {
  --units_[unit].active;
  if (!options_.releases) {
    return;
  }
  const std::vector<UnitId> next = order_.upcoming(std::max(1, options_.prefetch));
  const bool is_last = next.empty() && find_pass(open_)->grad && needs_backward;
  if (is_last) {
    retained_ = unit;
  }
  if (!is_last && std::find(next.begin(), next.end(), unit) == next.end()) {
    reshard(unit, out);
  }
}

// -- moves ----------------------------------------------------------------------------------

void Schedule::unshard(UnitId unit, Actions& out) {
  UnitState& state = units_[unit];
  if (!state.resident) {
    state.resident = true;
    state.late = false;
    out.push_back({ActionKind::Unshard, unit});
  }
}

void Schedule::reshard(UnitId unit, Actions& out) {
  UnitState& state = units_[unit];
  if (state.resident && state.active == 0 && !state.in_backward && state.holds == 0) {
    state.resident = false;
    state.late = state.held > 0;
    if (!state.late) {
      out.push_back({ActionKind::Reshard, unit});
    }
  }
}

void Schedule::reshard_all_but(const std::vector<UnitId>& keep, Actions& out) {
  for (UnitId unit = 0; unit < options_.num_units; ++unit) {
    if (units_[unit].resident && std::find(keep.begin(), keep.end(), unit) == keep.end()) {
      reshard(unit, out);
    }
  }
}

void Schedule::invalidate(UnitId unit, Actions& out) {
  if (options_.releases) {
    reshard(unit, out);
  } else if (options_.gathers) {
    units_[unit].resident = false;
  }
  close_loose_pass();
  units_[unit].changed_at = next_pass_;
  outdated_ = true;
}

void Schedule::hold_unsharded(UnitId unit, Actions& out) {
  ++units_[unit].holds;
  unshard(unit, out);
}

void Schedule::release_unsharded(UnitId unit, Actions& out) {
  --units_[unit].holds;
  if (options_.releases) {
    reshard(unit, out);
  }
}

} // namespace zerocore
