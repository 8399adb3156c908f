// Builds the step list of a backward.
#include "plan/backward_steps.h"

#include <unordered_map>

namespace zerocore {

namespace {

// The calls that take part in the backward, last first.
std::vector<Step> pre_steps(const std::vector<CallEvent>& events) {
  std::vector<Step> steps;
  for (int32_t i = static_cast<int32_t>(events.size()) - 1; i >= 0; --i) {
    if (events[i].kind == EventKind::Exit && events[i].needs_backward) {
      steps.push_back({StepKind::Pre, events[i].unit, events[i].call, events[i].reads});
    }
  }
  return steps;
}

// The call's own unit, and those of the next `ahead` calls that read parameters.
void add_gathers(const std::vector<Step>& pre, size_t call, int ahead, std::vector<Step>& steps) {
  if (pre[call].reads) {
    steps.push_back({StepKind::Gather, pre[call].unit});
  }
  for (size_t next = call + 1; next < pre.size() && ahead > 0; ++next) {
    if (pre[next].reads) {
      steps.push_back({StepKind::Gather, pre[next].unit});
      --ahead;
    }
  }
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
      add_gathers(pre, next_pre++, prefetch, steps);
    }
  }
  return steps;
}

} // namespace zerocore
