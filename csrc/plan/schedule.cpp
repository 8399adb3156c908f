// Runs the programs of forward and backward passes as far as the engine's events allow.
#include "plan/schedule.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "common/math.h"

namespace zerocore {

namespace {

// Returns the index of the call's Pre among the remaining instructions.
std::optional<size_t> find_pre(const Program& program, int32_t call) {
  return program.find([call](const Instruction& each) { return each.is_pre(call); });
}

} // namespace

// -- passes ---------------------------------------------------------------------------------

void Schedule::close_loose_pass() {
  if (!in_root_forward_) {
    open_ = -1;
  }
}

// A backward or a change of parameters inside running calls closes the pass in which they began.
// These calls move to the new pass; otherwise a backward would alternate between both passes.
void Schedule::open_loose_pass() {
  if (in_root_forward_ || open_ >= 0) {
    return;
  }
  ForwardPass& pass = passes_.open(/*grad=*/true);
  open_ = pass.id;
  for (Frame& frame : frames_) {
    if (frame.pass >= 0) {
      frame.pass = pass.id;
      frame.call = pass.num_calls++;
      pass.events.push_back({InstructionKind::Enter, frame.unit, true, frame.call});
    }
  }
}

// A pass follows the order if it has a backward, or if it unshards or reshards units.
void Schedule::begin_pass(bool grad, Actions& out) {
  close_loose_pass();
  open_ = passes_.open(grad).id;
  in_root_forward_ = true;
  retained_ = -1;
  reads_more_ = false;
  follows_ = grad || !residency_.all_stay();
  if (follows_) {
    order_.begin(grad);
    residency_.release_all_but(order_.program().next_entered(1 + prefetch_), out);
  }
}

void Schedule::end_pass(Actions& out) {
  leave_pass(out);
  finish_pass(/*agreed=*/true, {}, reads_more_);
}

Instructions Schedule::expected() const {
  Instructions events = order_.events();
  for (Instruction& event : events) {
    event.reads = event.reads || reads_all_;
  }
  return events;
}

void Schedule::leave_pass(Actions& out) {
  if (follows_) {
    finish_order(out);
  }
  in_root_forward_ = false;
  left_ = std::exchange(open_, -1);
}

void Schedule::finish_pass(bool agreed, const std::vector<bool>& needs, bool reads_all) {
  ForwardPass& pass = *passes_.find(std::exchange(left_, -1));
  if (std::exchange(follows_, false)) {
    pass.events = agreed ? order_.take_own() : order_.unite(needs);
    for (Instruction& event : pass.events) {
      event.reads = event.reads || reads_all;
    }
    reads_all_ = reads_all;
  }
  const bool wanted = std::any_of(pass.events.begin(), pass.events.end(), [](const auto& event) {
    return event.kind == InstructionKind::Exit && event.needs_backward;
  });
  if (!pass.grad || !wanted) {
    passes_.drop(pass.id);
  }
}

void Schedule::drop_pass() {
  passes_.drop(std::exchange(left_, -1));
  follows_ = false;
}

void Schedule::abort(Actions& out) {
  frames_.clear();
  passes_.clear();
  forget_backward();
  in_root_forward_ = false;
  follows_ = false;
  open_ = -1;
  left_ = -1;
  retained_ = -1;
  residency_.abort(out);
}

// -- calls ----------------------------------------------------------------------------------

void Schedule::enter(UnitId unit, bool grad, Actions& out) {
  Frame frame{unit};
  frame.follows = in_root_forward_ && follows_;
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
      pass->events.push_back({InstructionKind::Enter, unit, true, frame.call});
    }
    do_enter(unit, out);
  }
  ++residency_.uses(unit).entered;
  frames_.push_back(frame);
}

int32_t Schedule::enter_in_order(UnitId unit, Actions& out) {
  Program& program = order_.program();
  const auto found = program.find([&](const Instruction& each) { return each.is_enter(unit); });
  int32_t call = -1;
  if (found) {
    call = program.list()[*found].call;
    run_to(program, *found + 1, out);
  } else {
    finish_order(out);
    call = order_.add(unit);
    ++residency_.uses(unit).entered; // makes serve() keep the unit on this rank
    residency_.serve(unit, out);
    --residency_.uses(unit).entered;
  }
  order_.enter(call);
  return call;
}

CallHandle Schedule::exit(UnitId unit, bool needs_backward, bool reads, Actions& out, bool keep) {
  TORCH_INTERNAL_ASSERT(!frames_.empty() && frames_.back().unit == unit, "unbalanced exit");
  if (frames_.back().pass >= 0) {
    open_loose_pass();
  }
  const Frame frame = frames_.back();
  frames_.pop_back();
  --residency_.uses(unit).entered;
  if (frame.follows) {
    order_.exit(frame.call, needs_backward);
    const bool is_lookup = !order_.reads(frame.call);
    reads_more_ = reads_more_ || (is_lookup && reads && needs_backward);
    exit_calls(out);
    residency_.release_late(unit, out);
  } else {
    ForwardPass* pass = frame.pass >= 0 ? passes_.find(frame.pass) : nullptr;
    if (pass != nullptr) {
      const bool alone = keep && !residency_.is_released(unit);
      pass->events.push_back(
          {InstructionKind::Exit, unit, needs_backward, frame.call, true, alone});
    }
    --residency_.uses(unit).active;
    residency_.leave_forward(unit);
    if (!keep || in_root_forward_) {
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
    --uses.entered;
    uses.active -= frame.follows ? 0 : 1; // the order's exits decrement it for its own calls
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

void Schedule::serve_and_keep(UnitId unit, Actions& out) {
  residency_.uses(unit).in_backward = true;
  residency_.serve(unit, out);
}

void Schedule::finish_order(Actions& out) {
  run_to(order_.program(), order_.events().size(), out);
}

// Runs the exits that come next in the order, up to the exit of a call that is open on this rank.
void Schedule::exit_calls(Actions& out) {
  Program& program = order_.program();
  while (const Instruction* due = program.next()) {
    const bool is_open = std::ranges::any_of(
        frames_, [&](const Frame& frame) { return frame.follows && frame.call == due->call; });
    if (due->kind == InstructionKind::Enter || is_open) {
      return;
    }
    run_to(program, program.cursor() + 1, out);
  }
}

void Schedule::invalidate(UnitId unit, Actions& out, bool trained) {
  residency_.invalidate(unit, out);
  close_loose_pass();
  if (trained) {
    passes_.note_change(unit);
  }
}

// -- instructions ---------------------------------------------------------------------------

void Schedule::run_to(Program& program, size_t end, Actions& out) {
  while (program.cursor() < end) {
    carry_out(program.take(), out);
  }
}

void Schedule::carry_out(const Instruction& due, Actions& out) {
  switch (due.kind) {
    case InstructionKind::Enter:
      do_enter(due.unit, out);
      break;
    case InstructionKind::Exit:
      do_exit(due, out);
      break;
    case InstructionKind::Pre:
      units_[due.unit].call = due.call;
      units_[due.unit].ready = false;
      return;
    case InstructionKind::Gather:
      residency_.unshard(due.unit, out);
      return;
    case InstructionKind::Reduce:
    case InstructionKind::Release:
      do_release(due, out);
      return;
  }
  if (order_.program().next() == nullptr) {
    residency_.release_all_but({retained_}, out);
  }
}

void Schedule::do_enter(UnitId unit, Actions& out) {
  ++residency_.uses(unit).active;
  if (!residency_.gathers()) {
    return;
  }
  const bool in_order = in_root_forward_ && follows_;
  const auto next = in_order ? order_.program().next_entered(prefetch_) : std::vector<UnitId>{};
  residency_.release_all_but(next, out);
  residency_.unshard(unit, out);
  for (const UnitId ahead : next) {
    residency_.unshard(ahead, out);
  }
}

void Schedule::do_exit(const Instruction& due, Actions& out) {
  const UnitId unit = due.unit;
  --residency_.uses(unit).active;
  residency_.leave_forward(unit);
  if (!residency_.releases()) {
    return;
  }
  const std::vector<UnitId> next = order_.program().next_entered(std::max(1, prefetch_));
  const bool is_read = passes_.find(open_)->grad && due.needs_backward && due.reads;
  const bool is_last = retain_last_ && next.empty() && is_read;
  if (is_last) {
    retained_ = unit;
  }
  if (!is_last && std::find(next.begin(), next.end(), unit) == next.end()) {
    residency_.release(unit, out);
  }
}

// Reshards the unit before its reduction: the pool can then reuse its block for the gradients.
void Schedule::do_release(const Instruction& due, Actions& out) {
  const UnitId unit = due.unit;
  const bool reduces = due.kind == InstructionKind::Reduce;
  residency_.uses(unit).in_backward = false;
  if (reduces) {
    residency_.end_backward(unit);
  }
  const auto next = passes_.find(backward_)->backward.next_read(std::max(1, prefetch_));
  if (std::find(next.begin(), next.end(), unit) == next.end()) {
    residency_.release(unit, out);
  }
  if (reduces) {
    units_[unit].due = false;
    out.push_back({ActionKind::Reduce, unit});
  }
}

// -- the backward ---------------------------------------------------------------------------

void Schedule::begin_backward() {
  close_loose_pass();
  forget_backward();
  shape_ = 0;
}

bool Schedule::pre_backward(const CallHandle& call, Actions& out) {
  ForwardPass* pass = passes_.find(call.pass);
  if (pass != nullptr) {
    go_to_pass(*pass, out);
    Program& program = pass->backward;
    if (const auto found = find_pre(program, call.call)) {
      run_to(program, *found + 1, out);
      residency_.uses(call.unit).in_backward = true;
      while (program.next() != nullptr && program.next()->kind == InstructionKind::Gather) {
        run_to(program, program.cursor() + 1, out);
      }
      return true;
    }
  }
  // Either the call's backward has begun and this is a second output, or no program has the call.
  if (!residency_.is_here(call.unit) && passes_.reads(call)) {
    residency_.uses(call.unit).in_backward = true;
    residency_.unshard(call.unit, out);
  }
  return false;
}

bool Schedule::is_out_of_turn(const CallHandle& call) const {
  if (residency_.is_here(call.unit) || !passes_.reads(call)) {
    return false;
  }
  const ForwardPass* pass = passes_.find(call.pass);
  if (pass == nullptr || pass->id != backward_) {
    return pass == nullptr;
  }
  return !find_pre(pass->backward, call.call);
}

void Schedule::reach(const BackwardPosition& position, Actions& out) {
  ForwardPass* pass = passes_.find(position.pass);
  if (pass == nullptr || (backward_ >= 0 && pass->id > backward_)) {
    return; // a backward goes from the last pass to the first
  }
  go_to_pass(*pass, out);
  Program& program = pass->backward;
  while (const Instruction* due = program.next()) {
    if (due->kind != InstructionKind::Gather && due->call < position.end) {
      return;
    }
    run_to(program, program.cursor() + 1, out);
  }
}

bool Schedule::is_next(const CallHandle& call) const {
  const ForwardPass* pass = call.pass == backward_ ? passes_.find(backward_) : nullptr;
  const Instruction* due = pass == nullptr ? nullptr : pass->backward.next();
  return due != nullptr && due->is_pre(call.call);
}

bool Schedule::recompute(const CallHandle& call, Actions& out) {
  const bool first = pre_backward(call, out);
  residency_.uses(call.unit).in_backward = true;
  return first;
}

void Schedule::ready(UnitId unit, Actions& out) {
  if (residency_.is_released(unit)) {
    return; // the input's gradient may still need parameters that are frozen or were read detached
  }
  units_[unit].ready = true;
  ForwardPass* pass = passes_.find(backward_);
  while (const Instruction* due = pass == nullptr ? nullptr : pass->backward.next()) {
    const BackwardUnit& next = units_[due->unit];
    // The gradients must belong to the call that ends next, not to a nested call of the same unit.
    if (due->kind != InstructionKind::Reduce || !next.ready || next.call != due->call) {
      return;
    }
    run_to(pass->backward, pass->backward.cursor() + 1, out);
  }
}

void Schedule::end_backward(Actions& out) {
  retained_ = -1;
  finish_program(out);
  backward_ = -1;
  for (UnitId id = 0; id < static_cast<UnitId>(units_.size()); ++id) {
    BackwardUnit& unit = units_[id];
    residency_.leave_backward(id, out);
    unit.ready = false;
    if (std::exchange(unit.due, false)) {
      out.push_back({ActionKind::Reduce, id});
      waits_ = waits_ && residency_.uses(id).holds > 0;
    }
  }
  passes_.forget_backwards();
  residency_.release_all_but({}, out);
}

void Schedule::forget_backward() {
  backward_ = -1;
  for (BackwardUnit& unit : units_) {
    unit.ready = false;
    unit.due = false;
  }
}

// Returns the units that the backward of `pass` does not reduce. Either an earlier pass will go
// backward through them (see Note [Passes whose backward never comes]), or the user holds them
// unsharded and may use them outside of all calls.
std::vector<bool> Schedule::reduced_later(const ForwardPass& pass) const {
  std::vector<bool> later =
      waits_ ? passes_.awaited_before(pass.id) : std::vector<bool>(units_.size(), false);
  for (UnitId unit = 0; unit < static_cast<UnitId>(units_.size()); ++unit) {
    later[unit] = later[unit] || residency_.uses(unit).holds > 0;
  }
  return later;
}

void Schedule::start_program(ForwardPass& pass, Actions& out) {
  const std::vector<bool> later = reduced_later(pass);
  for (const Instruction& event : pass.events) {
    BackwardUnit& unit = units_[event.unit];
    unit.due = passes_.is_reducible(event.unit) && unit.reduced;
  }
  pass.backward = backward_program(
      pass.events, prefetch_, [&](UnitId unit) { return units_[unit].due && !later[unit]; });
  for (const Instruction& each : pass.backward.list()) {
    shape_ = mix(shape_, 8 * static_cast<uint64_t>(each.unit) + static_cast<uint64_t>(each.kind));
  }
  pass.consumed = true;
  backward_ = pass.id;
  residency_.release_all_but(pass.backward.next_read(prefetch_ + 1), out);
}

void Schedule::go_to_pass(ForwardPass& pass, Actions& out) {
  if (pass.id != backward_) {
    finish_program(out);
    start_program(pass, out);
  }
}

void Schedule::finish_program(Actions& out) {
  if (ForwardPass* pass = passes_.find(backward_)) {
    run_to(pass->backward, pass->backward.list().size(), out);
  }
}

void Schedule::abandon_program(Actions& out) {
  for (UnitId unit = 0; unit < static_cast<UnitId>(units_.size()); ++unit) {
    Residency::Uses& uses = residency_.uses(unit);
    uses.kept_for_backward = uses.kept_for_backward || uses.in_backward;
  }
  finish_program(out);
}

} // namespace zerocore
