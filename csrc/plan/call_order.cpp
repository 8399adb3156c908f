// The order of calls that ranks agree on.
#include "plan/call_order.h"

#include <algorithm>
#include <utility>

namespace zerocore {

namespace {

// Whether another call of the unit was made before this one was left: its backward begins earlier
// than that one's.
bool is_nest(const PassCalls& calls, size_t number) {
  const PassCall& call = calls[number];
  const auto begin = calls.begin() + static_cast<std::ptrdiff_t>(number) + 1;
  const auto end = std::max(begin, calls.begin() + call.last + 1);
  return std::any_of(
      begin, end, [&](const PassCall& each) { return each.made && each.unit == call.unit; });
}

// A number for the needs of a rank in the backward of a call: whether it has one, and when.
uint8_t needs_of(const PassCalls& calls, size_t number) {
  const PassCall& call = calls[number];
  return call.needs_backward ? 1 + (is_nest(calls, number) ? 1 : 0) : 0;
}

} // namespace

CallOrder::CallOrder(std::vector<CallEvent> events) {
  number_calls(events);
  take(std::move(events));
}

void CallOrder::take(std::vector<CallEvent> events) {
  events_ = std::move(events);
  expected_ = calls_of(events_);
  own_needs_.clear();
  for (size_t call = 0; call < expected_.size(); ++call) {
    own_needs_.push_back(needs_of(expected_, call));
  }
}

void CallOrder::begin(bool grad) {
  calls_ = expected_;
  cursor_ = 0;
  last_made_ = -1;
  grad_ = grad;
  changed_ = !learned_;
}

std::optional<int32_t> CallOrder::find(UnitId unit) const {
  const auto begin = events_.begin() + static_cast<std::ptrdiff_t>(cursor_);
  const auto found = std::find_if(
      begin, events_.end(), [&](const CallEvent& event) { return event.is_enter(unit); });
  return found == events_.end() ? std::nullopt : std::optional(found->call);
}

std::vector<UnitId> CallOrder::upcoming(int count) const {
  std::vector<UnitId> next;
  for (size_t i = cursor_; i < events_.size() && static_cast<int>(next.size()) < count; ++i) {
    const CallEvent& event = events_[i];
    if (event.kind == EventKind::Enter &&
        std::find(next.begin(), next.end(), event.unit) == next.end()) {
      next.push_back(event.unit);
    }
  }
  return next;
}

int32_t CallOrder::add(UnitId unit) {
  const auto number = static_cast<int32_t>(calls_.size());
  calls_.push_back({unit, number, grad_});
  changed_ = true;
  return number;
}

void CallOrder::enter(int32_t call) {
  calls_.at(call).made = true;
  last_made_ = call;
}

void CallOrder::leave(int32_t number, bool needs_backward) {
  PassCall& call = calls_.at(number);
  call.last = last_made_;
  call.needs_backward = needs_backward;
  if (static_cast<size_t>(number) < expected_.size()) {
    const bool longer = call.last > expected_[number].last;
    changed_ = changed_ || longer || (grad_ && needs_of(calls_, number) != own_needs_[number]);
  }
}

bool CallOrder::skipped() const {
  return std::any_of(calls_.begin(), calls_.end(), [](const PassCall& call) { return !call.made; });
}

std::vector<CallEvent> CallOrder::learn(const std::vector<PassCalls>& ranks, int own) {
  std::vector<CallEvent> events = events_of(unite(ranks));
  const NextCalls next = merge(ranks, own, /*keeps_unmade=*/learned_);
  take(events_of(next.calls));
  for (size_t i = 0; i < next.places.size(); ++i) {
    if (next.places[i] >= 0) {
      own_needs_[next.places[i]] = needs_of(ranks[own], i);
    }
  }
  learned_ = true;
  return events;
}

} // namespace zerocore
