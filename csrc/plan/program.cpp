#include "plan/program.h"

#include <algorithm>
#include <unordered_map>

namespace zerocore {

std::vector<UnitId> Program::next_entered(int count) const {
  std::vector<UnitId> units;
  for (size_t i = cursor_; i < list_.size() && static_cast<int>(units.size()) < count; ++i) {
    const Instruction& each = list_[i];
    if (each.kind == InstructionKind::Enter &&
        std::find(units.begin(), units.end(), each.unit) == units.end()) {
      units.push_back(each.unit);
    }
  }
  return units;
}

std::vector<UnitId> Program::next_read(int count) const {
  std::vector<UnitId> units;
  for (size_t i = cursor_; i < list_.size() && static_cast<int>(units.size()) < count; ++i) {
    if (list_[i].kind == InstructionKind::Pre && list_[i].reads) {
      units.push_back(list_[i].unit);
    }
  }
  return units;
}

namespace {

// Returns the calls that have a backward, last first.
Instructions pres_of(const Instructions& forward) {
  Instructions pres;
  for (auto event = forward.rbegin(); event != forward.rend(); ++event) {
    if (event->kind == InstructionKind::Exit && event->needs_backward) {
      pres.push_back({InstructionKind::Pre, event->unit, true, event->call, event->reads});
    }
  }
  return pres;
}

// Adds a Gather for the call's own unit, and for the next `ahead` calls that read parameters.
void add_gathers(const Instructions& pres, size_t call, int ahead, Instructions& list) {
  if (pres[call].reads) {
    list.push_back({InstructionKind::Gather, pres[call].unit});
  }
  for (size_t next = call + 1; next < pres.size() && ahead > 0; ++next) {
    if (pres[next].reads) {
      list.push_back({InstructionKind::Gather, pres[next].unit});
      --ahead;
    }
  }
}

} // namespace

Program backward_program(
    const Instructions& forward,
    int prefetch,
    const std::function<bool(UnitId)>& reduces) {
  const Instructions pres = pres_of(forward);
  std::unordered_map<UnitId, size_t> first; // by unit: index of its first Enter
  for (size_t i = 0; i < forward.size(); ++i) {
    first.emplace(forward[i].unit, i);
  }
  std::unordered_map<UnitId, int> depth; // by unit: its open calls at this event
  Instructions list;
  size_t next_pre = 0;
  for (size_t i = forward.size(); i-- > 0;) {
    const Instruction& event = forward[i];
    if (event.kind == InstructionKind::Enter) {
      if (--depth[event.unit] > 0) {
        continue; // the backward of an enclosing call of the unit continues
      }
      const bool reduce = first.at(event.unit) == i && reduces(event.unit);
      const auto kind = reduce ? InstructionKind::Reduce : InstructionKind::Release;
      list.push_back({kind, event.unit, true, event.call});
      continue;
    }
    ++depth[event.unit];
    if (event.needs_backward) {
      list.push_back(pres[next_pre]);
      add_gathers(pres, next_pre++, prefetch, list);
    }
  }
  return Program(std::move(list));
}

} // namespace zerocore
