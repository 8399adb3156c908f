// The backward half of the schedule: walks the step list of the pass that runs backward.
#include "plan/schedule.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include "common/math.h"

namespace zerocore {

void Schedule::begin_backward() {
  close_loose_pass();
  backward_ = -1;
  shape_ = 0;
  for (UnitState& unit : units_) {
    unit.ready = false;
    unit.due = false;
  }
}

bool Schedule::pre_backward(const CallHandle& call, Actions& out) {
  Pass* pass = find_pass(call.pass);
  if (pass != nullptr && pass->id != backward_) {
    finish_steps(out);
    start_steps(*pass, out);
  }
  if (pass != nullptr) {
    const auto begin = pass->steps.begin() + static_cast<std::ptrdiff_t>(pass->next);
    const auto found = std::find_if(begin, pass->steps.end(), [&](const Step& step) {
      return step.kind == StepKind::Pre && step.call == call.call;
    });
    if (found != pass->steps.end()) {
      run_steps(*pass, static_cast<size_t>(found - pass->steps.begin()) + 1, out);
      units_[call.unit].in_backward = true;
      units_[call.unit].ready = false;
      run_gathers(out);
      return true;
    }
  }
  // A second output of a call that is under way, or a call that no step list has.
  if (!is_resident(call.unit)) {
    units_[call.unit].in_backward = true;
    unshard(call.unit, out);
  }
  return false;
}

bool Schedule::is_out_of_turn(const CallHandle& call) const {
  if (is_resident(call.unit)) {
    return false;
  }
  const Pass* pass = find_pass(call.pass);
  if (pass == nullptr || pass->id != backward_) {
    return pass == nullptr;
  }
  return std::none_of(
      pass->steps.begin() + static_cast<std::ptrdiff_t>(pass->next),
      pass->steps.end(),
      [&](const Step& step) { return step.kind == StepKind::Pre && step.call == call.call; });
}

CallHandle Schedule::recomputed_call(UnitId unit, Actions& out) {
  if (backward_ < 0 && !passes_.empty()) {
    const auto wanted = std::find_if(
        passes_.rbegin(), passes_.rend(), [](const Pass& pass) { return !pass.consumed; });
    start_steps(wanted == passes_.rend() ? passes_.back() : *wanted, out);
  }
  if (const Pass* pass = find_pass(backward_)) {
    for (size_t i = pass->next; i < pass->steps.size(); ++i) {
      const Step& step = pass->steps[i];
      if (step.kind == StepKind::Pre && step.unit == unit) {
        return {pass->id, step.call, unit};
      }
    }
  }
  return {-1, -1, unit};
}

bool Schedule::recompute(UnitId unit, Actions& out) {
  if (units_[unit].in_backward) {
    if (!units_[unit].late) {
      unshard(unit, out);
    }
    return false;
  }
  const bool first = pre_backward(recomputed_call(unit, out), out);
  units_[unit].in_backward = true;
  return first;
}

void Schedule::ready(UnitId unit, Actions& out) {
  units_[unit].ready = true;
  Pass* pass = find_pass(backward_);
  while (pass != nullptr && pass->next < pass->steps.size()) {
    const Step& step = pass->steps[pass->next];
    if (step.kind != StepKind::Reduce || !units_[step.unit].ready) {
      return;
    }
    run_steps(*pass, pass->next + 1, out);
  }
}

void Schedule::end_backward(Actions& out) {
  finish_steps(out);
  backward_ = -1;
  retained_ = -1;
  for (UnitId id = 0; id < options_.num_units; ++id) {
    UnitState& unit = units_[id];
    unit.in_backward = false;
    unit.ready = false;
    if (std::exchange(unit.late, false)) {
      out.push_back({ActionKind::Reshard, id});
    }
    if (std::exchange(unit.due, false)) {
      out.push_back({ActionKind::Reduce, id});
      waits_ = waits_ && unit.holds > 0;
    }
  }
  for (Pass& pass : passes_) {
    pass.steps.clear();
  }
  if (options_.releases) {
    reshard_all_but({}, out);
  }
}

// Units that are not reduced in the backward of `pass`: an earlier pass still has to go backward
// through them (see Note [Passes whose backward never comes]), or somebody holds them unsharded and
// may use them outside of all calls.
std::vector<bool> Schedule::reduced_later(const Pass& pass) const {
  std::vector<bool> later(units_.size(), false);
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    later[unit] = units_[unit].holds > 0;
  }
  for (const Pass& other : passes_) {
    if (waits_ && other.id < pass.id && !other.consumed && !is_outdated(other)) {
      for (const CallEvent& event : other.events) {
        later[event.unit] =
            later[event.unit] || (event.kind == EventKind::Exit && event.needs_backward);
      }
    }
  }
  return later;
}

void Schedule::start_steps(Pass& pass, Actions& out) {
  const std::vector<bool> later = reduced_later(pass);
  for (const CallEvent& event : pass.events) {
    UnitState& unit = units_[event.unit];
    unit.due = unit.reducible && !unit.muted;
    shape_ = mix(shape_, 2 * static_cast<uint64_t>(event.unit) + (event.kind == EventKind::Exit));
  }
  pass.steps = backward_steps(pass.events, options_.prefetch, [&](UnitId unit) {
    return units_[unit].due && !later[unit];
  });
  pass.next = 0;
  pass.consumed = true;
  backward_ = pass.id;
  if (options_.releases) {
    std::vector<UnitId> keep;
    for (const Step& step : pass.steps) {
      if (step.kind == StepKind::Pre && static_cast<int>(keep.size()) <= options_.prefetch) {
        keep.push_back(step.unit);
      }
    }
    reshard_all_but(keep, out);
  }
}

void Schedule::do_step(const Step& step, Actions& out) {
  UnitState& state = units_[step.unit];
  switch (step.kind) {
    case StepKind::Pre:
      break;
    case StepKind::Gather:
      unshard(step.unit, out);
      break;
    case StepKind::Reduce:
    case StepKind::Release:
      // Released first: packing the gradients then finds the slot free.
      state.in_backward = false;
      if (options_.releases && !gathered_next(step.unit)) {
        reshard(step.unit, out);
      }
      if (step.kind == StepKind::Reduce) {
        state.due = false;
        out.push_back({ActionKind::Reduce, step.unit});
      }
      break;
  }
}

// Whether one of the next calls, within the prefetch window, is of this unit again.
bool Schedule::gathered_next(UnitId unit) const {
  for (const Pass& pass : passes_) {
    if (pass.id != backward_) {
      continue;
    }
    int seen = 0;
    for (size_t i = pass.next; i < pass.steps.size() && seen < std::max(1, options_.prefetch);
         ++i) {
      if (pass.steps[i].kind == StepKind::Pre) {
        ++seen;
        if (pass.steps[i].unit == unit) {
          return true;
        }
      }
    }
  }
  return false;
}

void Schedule::run_steps(Pass& pass, size_t end, Actions& out) {
  while (pass.next < end) {
    do_step(pass.steps[pass.next++], out);
  }
}

void Schedule::run_gathers(Actions& out) {
  Pass& pass = *find_pass(backward_);
  size_t end = pass.next;
  while (end < pass.steps.size() && pass.steps[end].kind == StepKind::Gather) {
    ++end;
  }
  run_steps(pass, end, out);
}

void Schedule::take_one(UnitId unit, Actions& out) {
  units_[unit].in_backward = true;
  serve_one(unit, out);
}

void Schedule::finish_steps(Actions& out) {
  if (Pass* pass = find_pass(backward_)) {
    run_steps(*pass, pass->steps.size(), out);
  }
}

} // namespace zerocore
