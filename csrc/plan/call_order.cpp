#include "plan/call_order.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "common/math.h"

namespace zerocore {

namespace {

// Numbers the calls in the order of their enters.
void number_calls(Instructions& events) {
  std::unordered_map<UnitId, std::vector<int32_t>> open;
  int32_t next = 0;
  for (Instruction& event : events) {
    std::vector<int32_t>& calls = open[event.unit];
    if (event.kind == InstructionKind::Enter) {
      calls.push_back(next++);
    }
    TORCH_CHECK_VALUE(!calls.empty(), "an exit of unit ", event.unit, " has no enter before it");
    event.call = calls.back();
    if (event.kind == InstructionKind::Exit) {
      calls.pop_back();
    }
  }
}

} // namespace

CallOrder::CallOrder(Instructions events) {
  number_calls(events);
  take(std::move(events));
}

void CallOrder::take(Instructions events) {
  program_ = Program(std::move(events));
  expected_.clear();
  for (const Instruction& event : program_.list()) {
    if (event.kind == InstructionKind::Enter) {
      expected_.push_back({event.unit, event.call, event.call});
    } else {
      Call& call = expected_.at(event.call);
      call.last = call.last_of_all = static_cast<int32_t>(expected_.size()) - 1;
      call.needs_backward = event.needs_backward;
      call.reads = event.reads;
    }
  }
}

// Puts each exit right after the enter of the call's `last`.
Instructions CallOrder::events_of(const std::vector<Call>& calls) {
  std::vector<std::vector<int32_t>> left_after(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    left_after.at(calls[i].last).push_back(static_cast<int32_t>(i));
  }
  Instructions events;
  for (size_t i = 0; i < calls.size(); ++i) {
    events.push_back({InstructionKind::Enter, calls[i].unit, true, static_cast<int32_t>(i)});
    for (auto call = left_after[i].rbegin(); call != left_after[i].rend(); ++call) {
      const Call& left = calls[*call];
      events.push_back({InstructionKind::Exit, left.unit, left.needs_backward, *call, left.reads});
    }
  }
  return events;
}

// -- in a pass ------------------------------------------------------------------------------

void CallOrder::begin(bool grad) {
  calls_ = expected_;
  program_.restart();
  last_made_ = -1;
  grad_ = grad;
  changed_ = !learned_;
}

std::optional<int32_t> CallOrder::find(UnitId unit) const {
  const auto found = program_.find([&](const Instruction& each) { return each.is_enter(unit); });
  return found ? std::optional(events()[*found].call) : std::nullopt;
}

int32_t CallOrder::add(UnitId unit) {
  changed_ = true;
  const auto number = static_cast<int32_t>(calls_.size());
  calls_.push_back({unit, number, number, grad_});
  return number;
}

std::vector<bool> CallOrder::late() const {
  std::vector<bool> late(needs().size());
  for (size_t i = 0; i < std::min(late.size(), calls_.size()); ++i) {
    late[i] = calls_[i].made && calls_[i].last > calls_[i].last_of_all;
  }
  return late;
}

void CallOrder::extend(const std::vector<bool>& calls) {
  for (size_t i = 0; i < std::min(calls.size(), calls_.size()); ++i) {
    if (calls[i]) {
      calls_[i].last_of_all = static_cast<int32_t>(calls_.size());
    }
  }
}

void CallOrder::enter(int32_t call) {
  calls_.at(call).made = true;
  last_made_ = call;
}

void CallOrder::exit(int32_t number, bool needs_backward) {
  Call& call = calls_.at(number);
  call.last = last_made_;
  if (grad_) {
    call.needs_backward = needs_backward;
  }
  if (static_cast<size_t>(number) < expected_.size()) {
    const Call& expected = expected_[number];
    changed_ =
        changed_ || call.last > expected.last || call.needs_backward != expected.needs_backward;
  }
}

// -- at its end -----------------------------------------------------------------------------

bool CallOrder::skipped() const {
  return std::any_of(calls_.begin(), calls_.end(), [](const Call& call) { return !call.made; });
}

uint64_t CallOrder::hash() const {
  uint64_t hash = 0;
  for (const Call& call : calls_) {
    const bool needs = call.made && call.needs_backward;
    hash = mix(hash, (static_cast<uint64_t>(call.unit) << 1) + (needs ? 1 : 0));
    hash = mix(hash, call.made ? static_cast<uint64_t>(call.last) + 1 : 0);
  }
  return hash;
}

std::vector<bool> CallOrder::needs() const {
  const size_t num_common = shared_ ? calls_.size() : expected_.size();
  std::vector<bool> needs(num_common + (shared_ ? 0 : num_units_));
  for (size_t i = 0; i < calls_.size(); ++i) {
    const Call& call = calls_[i];
    const size_t bit = i < num_common ? i : num_common + call.unit;
    const bool is_served = !call.made && i >= expected_.size(); // only other ranks make the call
    needs[bit] = needs[bit] || (call.needs_backward && !is_served);
  }
  return needs;
}

// Calls of the order that this pass did not make keep their places, except if the unit was called
// elsewhere, or if the order is not learned yet and may have units that are never called.
Instructions CallOrder::take_own() {
  if (!changed_) {
    return events();
  }
  std::unordered_set<UnitId> called;
  for (const Call& call : calls_) {
    if (call.made) {
      called.insert(call.unit);
    }
  }
  std::vector<Call> next;
  std::vector<int32_t> numbers(calls_.size(), -1); // new numbers, by old number
  for (size_t i = 0; i < calls_.size(); ++i) {
    Call call = calls_[i];
    if (call.made || (learned_ && !called.contains(call.unit))) {
      numbers[i] = static_cast<int32_t>(next.size());
      call.last = static_cast<int32_t>(i);
      next.push_back(call);
    }
  }
  for (size_t i = 0; i < calls_.size(); ++i) {
    if (numbers[i] >= 0) {
      next[numbers[i]].last = numbers[calls_[i].made ? calls_[i].last : i];
    }
  }
  learned_ = true;
  take(events_of(next));
  return events_of(calls_);
}

// If calls are not shared, a rank knows only the units of the calls that other ranks added. Their
// backward comes before the backward of the order.
Instructions CallOrder::unite(const std::vector<bool>& needs) {
  Instructions events = this->events();
  for (Instruction& event : events) {
    if (event.kind == InstructionKind::Exit) {
      event.needs_backward = needs.at(event.call);
    }
  }
  take(events);
  if (shared_) {
    std::vector<Call> calls = calls_;
    for (size_t i = 0; i < calls.size(); ++i) {
      calls[i].last = std::min(calls[i].last_of_all, static_cast<int32_t>(calls.size()) - 1);
      calls[i].needs_backward = needs.at(i);
    }
    return events_of(calls);
  }
  constexpr int32_t kNoCall = std::numeric_limits<int32_t>::max(); // no call has this number
  for (size_t i = expected_.size(); i < needs.size(); ++i) {
    const auto unit = static_cast<UnitId>(i - expected_.size());
    if (needs[i]) {
      events.push_back({InstructionKind::Enter, unit, true, kNoCall});
      events.push_back({InstructionKind::Exit, unit, true, kNoCall});
    }
  }
  return events;
}

} // namespace zerocore
