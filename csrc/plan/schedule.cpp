// Goes through the order of calls, and answers what each event asks for.
#include "plan/schedule.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

namespace zerocore {

// -- passes ---------------------------------------------------------------------------------

void Schedule::close_loose_pass() {
  if (!rooted_) {
    open_ = -1;
  }
}

// A backward, or a change of parameters, inside of calls has closed the pass they began in. They go
// on in this one, or a backward through their outputs would go back and forth between the two.
void Schedule::open_loose_pass() {
  if (rooted_ || open_ >= 0) {
    return;
  }
  ForwardPass& pass = passes_.open(/*grad=*/true);
  open_ = pass.id;
  for (Frame& frame : frames_) {
    if (frame.pass >= 0) {
      frame.pass = pass.id;
      frame.call = pass.num_calls++;
      pass.events.push_back({EventKind::Enter, frame.unit, true, frame.call});
    }
  }
}

// Ranks go through a pass together where it has a backward or where units come and go. A unit that
// the forward before has left for its backward is one of these.
void Schedule::begin_pass(bool grad, Actions& out) {
  close_loose_pass();
  open_ = passes_.open(grad).id;
  rooted_ = true;
  retained_ = -1;
  reads_more_ = false;
  follows_ = grad || !residency_.all_stay();
  if (follows_) {
    order_.begin(grad);
    residency_.release_all_but(order_.upcoming(1 + prefetch_), out);
  }
}

void Schedule::end_pass(Actions& out) {
  close_pass(out);
  settle_pass(/*agreed=*/true, {}, reads_more_);
}

std::vector<CallEvent> Schedule::expected() const {
  std::vector<CallEvent> events = order_.events();
  for (CallEvent& event : events) {
    event.reads = event.reads || reads_all_;
  }
  return events;
}

void Schedule::close_pass(Actions& out) {
  if (follows_) {
    finish_order(out);
  }
  rooted_ = false;
  closed_ = std::exchange(open_, -1);
}

void Schedule::settle_pass(bool agreed, const std::vector<bool>& needs, bool reads_all) {
  ForwardPass& pass = *passes_.find(std::exchange(closed_, -1));
  if (std::exchange(follows_, false)) {
    pass.events = agreed ? order_.take_own() : order_.unite(needs);
    for (CallEvent& event : pass.events) {
      event.reads = event.reads || reads_all;
    }
    reads_all_ = reads_all;
  }
  const bool wanted = std::any_of(pass.events.begin(), pass.events.end(), [](const auto& event) {
    return event.kind == EventKind::Exit && event.needs_backward;
  });
  if (!pass.grad || !wanted) {
    passes_.drop(pass.id);
  }
}

void Schedule::drop_pass() {
  passes_.drop(std::exchange(closed_, -1));
  follows_ = false;
}

void Schedule::abort(Actions& out) {
  frames_.clear();
  passes_.clear();
  walk_.abort();
  rooted_ = false;
  follows_ = false;
  open_ = -1;
  closed_ = -1;
  retained_ = -1;
  residency_.abort(out);
}

// -- calls ----------------------------------------------------------------------------------

void Schedule::enter(UnitId unit, bool grad, Actions& out) {
  Frame frame{unit};
  frame.follows = rooted_ && follows_;
  if (grad) {
    open_loose_pass();
  }
  if (frame.follows) {
    frame.pass = open_;
    frame.call = enter_in_order(unit, out);
  } else {
    if (ForwardPass* pass = grad ? passes_.find(open_) : nullptr) {
      frame.pass = pass->id;
      frame.call = pass->num_calls++;
      pass->events.push_back({EventKind::Enter, unit, true, frame.call});
    }
    do_enter(unit, out);
  }
  ++residency_.uses(unit).held;
  frames_.push_back(frame);
}

int32_t Schedule::enter_in_order(UnitId unit, Actions& out) {
  std::optional<int32_t> call = order_.find(unit);
  if (call) {
    go_to(*call, out);
  } else {
    finish_order(out);
    call = order_.add(unit);
    ++residency_.uses(unit).held; // by the call that is made
    residency_.serve(unit, out);
    --residency_.uses(unit).held;
  }
  order_.enter(*call);
  return *call;
}

CallHandle Schedule::exit(UnitId unit, bool needs_backward, bool reads, Actions& out, bool keep) {
  TORCH_INTERNAL_ASSERT(!frames_.empty() && frames_.back().unit == unit, "unbalanced exit");
  if (frames_.back().pass >= 0) {
    open_loose_pass();
  }
  const Frame frame = frames_.back();
  frames_.pop_back();
  --residency_.uses(unit).held;
  if (frame.follows) {
    order_.leave(frame.call, needs_backward);
    const bool is_lookup = !order_.reads(frame.call);
    reads_more_ = reads_more_ || (is_lookup && reads && needs_backward);
    leave_calls(out);
    residency_.release_late(unit, out);
  } else {
    ForwardPass* pass = frame.pass >= 0 ? passes_.find(frame.pass) : nullptr;
    if (pass != nullptr) {
      const bool alone = keep && !residency_.is_released(unit);
      pass->events.push_back({EventKind::Exit, unit, needs_backward, frame.call, true, alone});
    }
    --residency_.uses(unit).active;
    residency_.leave_forward(unit);
    if (!keep || rooted_) {
      residency_.release(unit, out);
    }
  }
  return {frame.pass, frame.call, unit};
}

void Schedule::cancel_calls(size_t num) {
  while (frames_.size() > num) {
    const Frame frame = frames_.back();
    frames_.pop_back();
    Residency::Uses& uses = residency_.uses(frame.unit);
    --uses.held;
    uses.active -= frame.follows ? 0 : 1; // the order has its own exits
  }
}

std::vector<bool> Schedule::open_calls() const {
  std::vector<bool> open = order_.late();
  for (const Frame& frame : frames_) {
    if (frame.follows && static_cast<size_t>(frame.call) < open.size()) {
      open[frame.call] = true;
    }
  }
  return open;
}

void Schedule::serve(UnitId unit, Actions& out) {
  order_.add(unit);
  residency_.serve(unit, out);
}

void Schedule::take_one(UnitId unit, Actions& out) {
  residency_.uses(unit).in_backward = true;
  residency_.serve(unit, out);
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
    do_exit(event, out);
  }
  if (order_.next() == nullptr) {
    residency_.release_all_but({retained_}, out);
  }
}

void Schedule::do_enter(UnitId unit, Actions& out) {
  ++residency_.uses(unit).active;
  if (!residency_.gathers()) {
    return;
  }
  const bool in_order = rooted_ && follows_;
  const auto next = in_order ? order_.upcoming(prefetch_) : std::vector<UnitId>{};
  residency_.release_all_but(next, out);
  residency_.unshard(unit, out);
  for (const UnitId ahead : next) {
    residency_.unshard(ahead, out);
  }
}

void Schedule::do_exit(const CallEvent& event, Actions& out) {
  const UnitId unit = event.unit;
  --residency_.uses(unit).active;
  residency_.leave_forward(unit);
  if (!residency_.releases()) {
    return;
  }
  const std::vector<UnitId> next = order_.upcoming(std::max(1, prefetch_));
  const bool is_read = passes_.find(open_)->grad && event.needs_backward && event.reads;
  const bool is_last = retain_last_ && next.empty() && is_read;
  if (is_last) {
    retained_ = unit;
  }
  if (!is_last && std::find(next.begin(), next.end(), unit) == next.end()) {
    residency_.release(unit, out);
  }
}

void Schedule::invalidate(UnitId unit, Actions& out, bool trained) {
  residency_.invalidate(unit, out);
  close_loose_pass();
  if (trained) {
    passes_.note_change(unit);
  }
}

} // namespace zerocore
