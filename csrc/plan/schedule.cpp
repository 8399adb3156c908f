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

Schedule::Schedule(ScheduleOptions options, std::vector<CallEvent> order)
    : options_(options),
      order_(std::move(order)),
      units_(options.num_units),
      called_(options.num_units) {
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

void Schedule::begin_pass(bool grad, Actions& out) {
  close_loose_pass();
  open_pass(grad);
  rooted_ = true;
  changed_ = false;
  cursor_ = 0;
  retained_ = -1;
  if (options_.releases) {
    reshard_all_but(upcoming(1 + options_.prefetch), out);
  }
}

void Schedule::end_pass(Actions& out) {
  skip_to(order_.size(), out);
  for (UnitId unit = 0; unit < options_.num_units; ++unit) {
    while (units_[unit].skipped > 0) { // calls in another order than the exits were matched in
      skip({EventKind::Exit, unit}, out);
    }
  }
  Pass& pass = *find_pass(open_);
  if (changed_) {
    relearn(pass);
  }
  rooted_ = false;
  open_ = -1;
  if (options_.releases) {
    reshard_all_but(pass.grad ? std::vector<UnitId>{retained_} : std::vector<UnitId>{}, out);
  }
  const bool wanted = std::any_of(pass.events.begin(), pass.events.end(), [](const auto& event) {
    return event.kind == EventKind::Exit && event.needs_backward;
  });
  if (!pass.grad || !wanted) {
    passes_.pop_back();
  }
}

void Schedule::abort(Actions& out) {
  frames_.clear();
  for (UnitState& unit : units_) {
    unit.active = 0;
    unit.skipped = 0;
    unit.in_backward = false;
    unit.ready = false;
    unit.due = false;
  }
  passes_.clear();
  rooted_ = false;
  open_ = -1;
  backward_ = -1;
  retained_ = -1;
  if (options_.releases) {
    reshard_all_but({}, out);
  }
}

// -- calls ----------------------------------------------------------------------------------

void Schedule::enter(UnitId unit, bool grad, Actions& out) {
  Frame frame{unit};
  called_[unit] = true;
  if (rooted_) {
    const auto event = find_event(EventKind::Enter, unit);
    if (event) {
      skip_to(*event, out);
      cursor_ = *event + 1;
      frame.in_order = true;
    } else {
      changed_ = true;
    }
  } else if (grad && open_ < 0) {
    open_pass(grad);
  }
  if (rooted_ || grad) {
    find_pass(open_)->events.push_back({EventKind::Enter, unit});
    frame.recorded = true;
  }
  frames_.push_back(frame);
  do_enter(unit, out);
}

CallHandle Schedule::exit(UnitId unit, bool needs_backward, Actions& out, bool keep) {
  TORCH_INTERNAL_ASSERT(!frames_.empty() && frames_.back().unit == unit, "unbalanced exit");
  const Frame frame = frames_.back();
  frames_.pop_back();
  if (frame.in_order) {
    if (const auto event = find_event(EventKind::Exit, unit)) {
      skip_to(*event, out);
      if (find_pass(open_)->grad) {
        order_[*event].needs_backward = needs_backward;
      }
      cursor_ = *event + 1;
    } else {
      changed_ = true;
    }
  }
  CallHandle call{-1, -1, unit};
  if (Pass* pass = find_pass(open_); pass != nullptr && frame.recorded) {
    call.pass = pass->id;
    call.exit = static_cast<int32_t>(pass->events.size());
    pass->events.push_back({EventKind::Exit, unit, needs_backward});
  }
  do_exit(unit, needs_backward, keep, out);
  return call;
}

// The next matching event of the order. Does not look past the exit of a unit this rank is in:
// passing over it would give the unit back under the running call.
std::optional<size_t> Schedule::find_event(EventKind kind, UnitId unit) const {
  for (size_t i = cursor_; i < order_.size(); ++i) {
    const CallEvent& event = order_[i];
    if (event.kind == kind && event.unit == unit) {
      return i;
    }
    const bool is_open = std::any_of(frames_.begin(), frames_.end(), [&](const Frame& frame) {
      return frame.in_order && frame.unit == event.unit;
    });
    if (event.kind == EventKind::Exit && is_open) {
      return std::nullopt;
    }
  }
  return std::nullopt;
}

void Schedule::skip_to(size_t end, Actions& out) {
  while (cursor_ < end) {
    const CallEvent& event = order_[cursor_++];
    // The exit of a call that this rank makes comes when it leaves it.
    if (event.kind == EventKind::Enter || units_[event.unit].skipped > 0) {
      skip(event, out);
    }
  }
}

void Schedule::skip(CallEvent event, Actions& out) {
  event.skipped = true;
  find_pass(open_)->events.push_back(event);
  if (event.kind == EventKind::Enter) {
    ++units_[event.unit].skipped;
    do_enter(event.unit, out);
  } else {
    --units_[event.unit].skipped;
    do_exit(event.unit, event.needs_backward, false, out);
  }
}

// The next `count` different units that the order enters.
std::vector<UnitId> Schedule::upcoming(int count) const {
  std::vector<UnitId> next;
  for (size_t i = cursor_; i < order_.size() && static_cast<int>(next.size()) < count; ++i) {
    const CallEvent& event = order_[i];
    if (event.kind == EventKind::Enter &&
        std::find(next.begin(), next.end(), event.unit) == next.end()) {
      next.push_back(event.unit);
    }
  }
  return next;
}

void Schedule::do_enter(UnitId unit, Actions& out) {
  ++units_[unit].active;
  if (!options_.gathers) {
    return;
  }
  const std::vector<UnitId> next = rooted_ ? upcoming(options_.prefetch) : std::vector<UnitId>{};
  if (options_.releases) {
    reshard_all_but(next, out);
  }
  unshard(unit, out);
  for (const UnitId ahead : next) {
    unshard(ahead, out);
  }
}

void Schedule::do_exit(UnitId unit, bool needs_backward, bool keep, Actions& out) {
  --units_[unit].active;
  if (!options_.releases || (keep && !rooted_)) {
    return;
  }
  if (rooted_) {
    const std::vector<UnitId> next = upcoming(std::max(1, options_.prefetch));
    const bool is_last = next.empty() && find_pass(open_)->grad && needs_backward;
    if (is_last) {
      retained_ = unit;
    }
    if (is_last || std::find(next.begin(), next.end(), unit) != next.end()) {
      return;
    }
  }
  reshard(unit, out);
}

void Schedule::relearn(const Pass& pass) {
  std::vector<bool> called(units_.size(), false);
  for (const CallEvent& event : pass.events) {
    called[event.unit] = called[event.unit] || !event.skipped;
  }
  order_.clear();
  for (CallEvent event : pass.events) {
    if (!event.skipped || !called[event.unit]) {
      event.skipped = false;
      order_.push_back(event);
    }
  }
}

void Schedule::prune(const std::vector<bool>& called) {
  std::erase_if(order_, [&](const CallEvent& event) { return !called.at(event.unit); });
}

// -- moves ----------------------------------------------------------------------------------

void Schedule::unshard(UnitId unit, Actions& out) {
  if (!units_[unit].resident) {
    units_[unit].resident = true;
    out.push_back({ActionKind::Unshard, unit});
  }
}

void Schedule::reshard(UnitId unit, Actions& out) {
  UnitState& state = units_[unit];
  if (state.resident && !is_active(unit)) {
    state.resident = false;
    out.push_back({ActionKind::Reshard, unit});
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

void Schedule::pin(UnitId unit, Actions& out) {
  ++units_[unit].pinned;
  unshard(unit, out);
}

void Schedule::unpin(UnitId unit, Actions& out) {
  --units_[unit].pinned;
  if (options_.releases) {
    reshard(unit, out);
  }
}

} // namespace zerocore
