// Walks the step list of the pass that runs backward.
#include "plan/backward_walk.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "common/math.h"

namespace zerocore {

namespace {

// The calls that take part in the backward, last first.
std::vector<BackwardStep> pre_steps(const std::vector<CallEvent>& events) {
  std::vector<BackwardStep> steps;
  for (int32_t i = static_cast<int32_t>(events.size()) - 1; i >= 0; --i) {
    if (events[i].kind == EventKind::Exit && events[i].needs_backward) {
      steps.push_back({BackwardStepKind::Pre, events[i].unit, events[i].call, events[i].reads});
    }
  }
  return steps;
}

// The call's own unit, and those of the next `ahead` calls that read parameters.
void add_gathers(
    const std::vector<BackwardStep>& pre,
    size_t call,
    int ahead,
    std::vector<BackwardStep>& steps) {
  if (pre[call].reads) {
    steps.push_back({BackwardStepKind::Gather, pre[call].unit});
  }
  for (size_t next = call + 1; next < pre.size() && ahead > 0; ++next) {
    if (pre[next].reads) {
      steps.push_back({BackwardStepKind::Gather, pre[next].unit});
      --ahead;
    }
  }
}

// The steps of a backward through the calls. `reduces(unit)` says whether the unit's gradients are
// reduced when its first call is left.
template <typename Reduces>
std::vector<BackwardStep> backward_steps(
    const std::vector<CallEvent>& events,
    int prefetch,
    const Reduces& reduces) {
  const std::vector<BackwardStep> pre = pre_steps(events);
  std::unordered_map<UnitId, size_t> first; // event of the unit
  for (size_t i = 0; i < events.size(); ++i) {
    first.emplace(events[i].unit, i);
  }
  std::unordered_map<UnitId, int> depth; // calls of the unit around the place in the list
  std::vector<BackwardStep> steps;
  size_t next_pre = 0;
  for (size_t i = events.size(); i-- > 0;) {
    const CallEvent& event = events[i];
    if (event.kind == EventKind::Enter) {
      if (--depth[event.unit] > 0) {
        continue; // a call of the unit is around this one, and its backward goes on
      }
      const bool reduce = first.at(event.unit) == i && reduces(event.unit);
      steps.push_back(
          {reduce ? BackwardStepKind::Reduce : BackwardStepKind::Release, event.unit, event.call});
      continue;
    }
    ++depth[event.unit];
    if (event.needs_backward) {
      steps.push_back(pre[next_pre]);
      add_gathers(pre, next_pre++, prefetch, steps);
    }
  }
  return steps;
}

// Where the call's backward begins among the steps that are not done; their end for nowhere.
auto find_pre(const ForwardPass& pass, const CallHandle& call) {
  const auto begin = pass.steps.begin() + static_cast<std::ptrdiff_t>(pass.next);
  return std::find_if(
      begin, pass.steps.end(), [&](const BackwardStep& step) { return step.is_pre(call.call); });
}

} // namespace

void BackwardWalk::begin() {
  abort();
  shape_ = 0;
}

bool BackwardWalk::pre_backward(const CallHandle& call, Actions& out) {
  ForwardPass* pass = passes_.find(call.pass);
  if (pass != nullptr) {
    go_to_pass(*pass, out);
    const auto found = find_pre(*pass, call);
    if (found != pass->steps.end()) {
      run_steps(*pass, static_cast<size_t>(found - pass->steps.cbegin()) + 1, out);
      residency_.uses(call.unit).in_backward = true;
      run_gathers(out);
      return true;
    }
  }
  // A second output of a call that is under way, or a call that no step list has.
  if (!residency_.is_here(call.unit) && passes_.reads(call)) {
    residency_.uses(call.unit).in_backward = true;
    residency_.unshard(call.unit, out);
  }
  return false;
}

bool BackwardWalk::is_out_of_turn(const CallHandle& call) const {
  if (residency_.is_here(call.unit) || !passes_.reads(call)) {
    return false;
  }
  const ForwardPass* pass = passes_.find(call.pass);
  if (pass == nullptr || pass->id != pass_) {
    return pass == nullptr;
  }
  return find_pre(*pass, call) == pass->steps.end();
}

void BackwardWalk::reach(const BackwardPlace& place, Actions& out) {
  ForwardPass* pass = passes_.find(place.pass);
  if (pass == nullptr || (pass_ >= 0 && pass->id > pass_)) {
    return; // a backward goes from the last pass to the first
  }
  go_to_pass(*pass, out);
  while (pass->next < pass->steps.size()) {
    const BackwardStep& step = pass->steps[pass->next];
    if (step.kind != BackwardStepKind::Gather && step.call < place.end) {
      return;
    }
    run_steps(*pass, pass->next + 1, out);
  }
}

bool BackwardWalk::is_next(const CallHandle& call) const {
  const ForwardPass* pass = passes_.find(pass_);
  if (pass == nullptr || call.pass != pass_ || pass->next >= pass->steps.size()) {
    return false;
  }
  return pass->steps[pass->next].is_pre(call.call);
}

bool BackwardWalk::recompute(const CallHandle& call, Actions& out) {
  const bool first = pre_backward(call, out);
  residency_.uses(call.unit).in_backward = true;
  return first;
}

void BackwardWalk::ready(UnitId unit, Actions& out) {
  if (residency_.is_released(unit)) {
    return; // the gradient of its input may still need it, frozen or read detached
  }
  units_[unit].ready = true;
  ForwardPass* pass = passes_.find(pass_);
  while (pass != nullptr && pass->next < pass->steps.size()) {
    const BackwardStep& step = pass->steps[pass->next];
    const UnitState& next = units_[step.unit];
    // Gradients of a call inside of the one that is to be left say nothing of it.
    if (step.kind != BackwardStepKind::Reduce || !next.ready || next.call != step.call) {
      return;
    }
    run_steps(*pass, pass->next + 1, out);
  }
}

void BackwardWalk::end(Actions& out) {
  finish_steps(out);
  pass_ = -1;
  for (UnitId id = 0; id < static_cast<UnitId>(units_.size()); ++id) {
    UnitState& unit = units_[id];
    residency_.leave_backward(id, out);
    unit.ready = false;
    if (std::exchange(unit.due, false)) {
      out.push_back({ActionKind::Reduce, id});
      waits_ = waits_ && residency_.uses(id).holds > 0;
    }
  }
  passes_.forget_steps();
  residency_.release_all_but({}, out);
}

void BackwardWalk::abort() {
  pass_ = -1;
  for (UnitState& unit : units_) {
    unit.ready = false;
    unit.due = false;
  }
}

// Units that are not reduced in the backward of `pass`: an earlier pass still has to go backward
// through them (see Note [Passes whose backward never comes]), or somebody holds them unsharded and
// may use them outside of all calls.
std::vector<bool> BackwardWalk::reduced_later(const ForwardPass& pass) const {
  std::vector<bool> later =
      waits_ ? passes_.awaited_before(pass.id) : std::vector<bool>(units_.size(), false);
  for (UnitId unit = 0; unit < static_cast<UnitId>(units_.size()); ++unit) {
    later[unit] = later[unit] || residency_.uses(unit).holds > 0;
  }
  return later;
}

void BackwardWalk::start_steps(ForwardPass& pass, Actions& out) {
  const std::vector<bool> later = reduced_later(pass);
  for (const CallEvent& event : pass.events) {
    UnitState& unit = units_[event.unit];
    unit.due = passes_.is_reducible(event.unit) && !unit.muted;
  }
  pass.steps = backward_steps(
      pass.events, prefetch_, [&](UnitId unit) { return units_[unit].due && !later[unit]; });
  for (const BackwardStep& step : pass.steps) {
    shape_ = mix(shape_, 4 * static_cast<uint64_t>(step.unit) + static_cast<uint64_t>(step.kind));
  }
  pass.next = 0;
  pass.consumed = true;
  pass_ = pass.id;
  std::vector<UnitId> keep;
  for (const BackwardStep& step : pass.steps) {
    if (step.kind == BackwardStepKind::Pre && step.reads &&
        static_cast<int>(keep.size()) <= prefetch_) {
      keep.push_back(step.unit);
    }
  }
  residency_.release_all_but(keep, out);
}

void BackwardWalk::go_to_pass(ForwardPass& pass, Actions& out) {
  if (pass.id != pass_) {
    finish_steps(out);
    start_steps(pass, out);
  }
}

void BackwardWalk::do_step(const BackwardStep& step, Actions& out) {
  switch (step.kind) {
    case BackwardStepKind::Pre:
      units_[step.unit].call = step.call;
      units_[step.unit].ready = false;
      break;
    case BackwardStepKind::Gather:
      residency_.unshard(step.unit, out);
      break;
    case BackwardStepKind::Reduce:
    case BackwardStepKind::Release:
      // Released first: packing the gradients then finds the slot free.
      residency_.uses(step.unit).in_backward = false;
      if (step.kind == BackwardStepKind::Reduce) {
        residency_.end_backward(step.unit);
      }
      if (!gathered_next(step.unit)) {
        residency_.release(step.unit, out);
      }
      if (step.kind == BackwardStepKind::Reduce) {
        units_[step.unit].due = false;
        out.push_back({ActionKind::Reduce, step.unit});
      }
      break;
  }
}

// Whether one of the next calls that read parameters, within the prefetch window, is of this unit.
bool BackwardWalk::gathered_next(UnitId unit) const {
  const ForwardPass& pass = *passes_.find(pass_);
  int seen = 0;
  for (size_t i = pass.next; i < pass.steps.size() && seen < std::max(1, prefetch_); ++i) {
    if (pass.steps[i].kind == BackwardStepKind::Pre && pass.steps[i].reads) {
      ++seen;
      if (pass.steps[i].unit == unit) {
        return true;
      }
    }
  }
  return false;
}

void BackwardWalk::run_steps(ForwardPass& pass, size_t end, Actions& out) {
  while (pass.next < end) {
    do_step(pass.steps[pass.next++], out);
  }
}

void BackwardWalk::run_gathers(Actions& out) {
  ForwardPass& pass = *passes_.find(pass_);
  size_t end = pass.next;
  while (end < pass.steps.size() && pass.steps[end].kind == BackwardStepKind::Gather) {
    ++end;
  }
  run_steps(pass, end, out);
}

void BackwardWalk::finish_steps(Actions& out) {
  if (ForwardPass* pass = passes_.find(pass_)) {
    run_steps(*pass, pass->steps.size(), out);
  }
}

void BackwardWalk::leave_order(Actions& out) {
  for (UnitId unit = 0; unit < static_cast<UnitId>(units_.size()); ++unit) {
    Residency::Uses& uses = residency_.uses(unit);
    uses.kept = uses.kept || uses.in_backward;
  }
  finish_steps(out);
}

} // namespace zerocore
