// Builds the step list of a backward.
#include "plan/backward_steps.h"

#include <algorithm>
#include <unordered_map>

namespace zerocore {

namespace {

// The calls that take part in the backward, last first.
std::vector<Step> pre_steps(const std::vector<CallEvent>& events) {
  std::vector<Step> steps;
  for (int32_t i = static_cast<int32_t>(events.size()) - 1; i >= 0; --i) {
    if (events[i].kind == EventKind::Exit && events[i].needs_backward) {
      steps.push_back({StepKind::Pre, events[i].unit, events[i].call});
    }
  }
  return steps;
}

std::unordered_map<UnitId, size_t> first_enters(const std::vector<CallEvent>& events) {
  std::unordered_map<UnitId, size_t> first;
  for (size_t i = 0; i < events.size(); ++i) {
    if (events[i].kind == EventKind::Enter) {
      first.emplace(events[i].unit, i);
    }
  }
  return first;
}

} // namespace

std::vector<Step> backward_steps(
    const std::vector<CallEvent>& events,
    int prefetch,
    const std::function<bool(UnitId)>& reduces) {
  const std::vector<Step> pre = pre_steps(events);
  const auto first = first_enters(events);
  std::unordered_map<UnitId, int> depth; // calls of the unit around the place in the list
  std::vector<Step> steps;
  size_t next_pre = 0;
  for (size_t i = events.size(); i-- > 0;) {
    const CallEvent& event = events[i];
    if (event.kind == EventKind::Enter) {
      if (--depth[event.unit] > 0) {
        continue; // a call of the unit is around this one, and its backward goes on
      }
      const bool reduce = first.at(event.unit) == i && reduces(event.unit);
      steps.push_back({reduce ? StepKind::Reduce : StepKind::Release, event.unit, event.call});
      continue;
    }
    ++depth[event.unit];
    if (event.needs_backward) {
      steps.push_back(pre[next_pre]);
      const size_t end = std::min(pre.size(), next_pre + 1 + static_cast<size_t>(prefetch));
      for (size_t k = next_pre; k < end; ++k) {
        steps.push_back({StepKind::Gather, pre[k].unit});
      }
      ++next_pre;
    }
  }
  return steps;
}

} // namespace zerocore
