// The order of calls that all ranks agree on, and how their lists of calls are merged into it.
#include "plan/call_order.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

namespace zerocore {

namespace {

using Numbers = std::vector<int32_t>;

// Places of two sequences in a shortest one that holds both. Where either may come next, that of
// `first` does.
struct Alignment {
  std::vector<size_t> first, second;
  size_t size = 0;
};

// Lengths of the longest common subsequences of all pairs of tails, from element `skipped` on.
std::vector<Numbers> common_tails(
    const std::vector<UnitId>& first,
    const std::vector<UnitId>& second,
    size_t skipped) {
  std::vector<Numbers> lengths(first.size() + 1 - skipped, Numbers(second.size() + 1 - skipped));
  for (size_t i = first.size() - skipped; i-- > 0;) {
    for (size_t k = second.size() - skipped; k-- > 0;) {
      const bool same = first[i + skipped] == second[k + skipped];
      lengths[i][k] =
          same ? lengths[i + 1][k + 1] + 1 : std::max(lengths[i + 1][k], lengths[i][k + 1]);
    }
  }
  return lengths;
}

Alignment align(const std::vector<UnitId>& first, const std::vector<UnitId>& second) {
  Alignment result;
  size_t i = 0;
  size_t k = 0;
  const auto take = [&](bool from_first, bool from_second) {
    if (from_first) {
      result.first.push_back(result.size);
      ++i;
    }
    if (from_second) {
      result.second.push_back(result.size);
      ++k;
    }
    ++result.size;
  };
  while (i < first.size() && k < second.size() && first[i] == second[k]) {
    take(true, true);
  }
  const size_t skipped = i;
  const std::vector<Numbers> tails = common_tails(first, second, skipped);
  while (i < first.size() || k < second.size()) {
    const bool both = i < first.size() && k < second.size();
    if (both && first[i] == second[k]) {
      take(true, true);
    } else if (
        k == second.size() ||
        (both && tails[i + 1 - skipped][k - skipped] >= tails[i - skipped][k + 1 - skipped])) {
      take(true, false);
    } else {
      take(false, true);
    }
  }
  return result;
}

// Of the united calls, those that no rank made and that stay in the list.
std::vector<bool> kept_calls(const PassCalls& calls) {
  std::unordered_map<UnitId, bool> is_called;
  for (const PassCall& call : calls) {
    is_called[call.unit] |= call.made;
  }
  std::vector<bool> kept;
  for (const PassCall& call : calls) {
    kept.push_back(!is_called[call.unit] && call.last >= 0);
  }
  return kept;
}

// Sequences of call numbers that were merged, and where each of their members lies.
class Merger {
 public:
  explicit Merger(const PassCalls& calls) : calls_(calls) {}

  void add(const Numbers& sequence) {
    if (places_.contains(sequence)) {
      return;
    }
    std::vector<UnitId> units;
    for (const int32_t number : sequence) {
      units.push_back(calls_[number].unit);
    }
    const Alignment found = align(units_, units);
    for (auto& [_, places] : places_) {
      for (size_t& place : places) {
        place = found.first[place];
      }
    }
    places_[sequence] = found.second;
    std::vector<UnitId> merged(found.size);
    for (size_t i = 0; i < units_.size(); ++i) {
      merged[found.first[i]] = units_[i];
    }
    for (size_t i = 0; i < units.size(); ++i) {
      merged[found.second[i]] = units[i];
    }
    units_ = std::move(merged);
  }

  const std::vector<UnitId>& units() const {
    return units_;
  }
  // By the calls' numbers; -1 for those that the sequence does not have.
  std::vector<int32_t> places_of(const Numbers& sequence) const {
    std::vector<int32_t> result(calls_.size(), -1);
    const std::vector<size_t>& places = places_.at(sequence);
    for (size_t i = 0; i < sequence.size(); ++i) {
      result[sequence[i]] = static_cast<int32_t>(places[i]);
    }
    return result;
  }

 private:
  const PassCalls& calls_;
  std::vector<UnitId> units_;
  std::map<Numbers, std::vector<size_t>> places_;
};

Numbers sequence_of(const PassCalls& calls, const std::vector<bool>& kept) {
  Numbers sequence;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (calls[i].made || kept[i]) {
      sequence.push_back(static_cast<int32_t>(i));
    }
  }
  return sequence;
}

} // namespace

void number_calls(std::vector<CallEvent>& events) {
  std::unordered_map<UnitId, std::vector<int32_t>> open;
  int32_t next = 0;
  for (CallEvent& event : events) {
    std::vector<int32_t>& calls = open[event.unit];
    if (event.kind == EventKind::Enter) {
      calls.push_back(next++);
    }
    TORCH_CHECK_VALUE(!calls.empty(), "an exit of unit ", event.unit, " has no enter before it");
    event.call = calls.back();
    if (event.kind == EventKind::Exit) {
      calls.pop_back();
    }
  }
}

PassCalls calls_of(const std::vector<CallEvent>& events) {
  PassCalls calls;
  for (const CallEvent& event : events) {
    if (event.kind == EventKind::Enter) {
      const auto number = static_cast<int32_t>(calls.size());
      calls.push_back({event.unit, number, event.needs_backward});
    } else {
      calls.at(event.call).last = static_cast<int32_t>(calls.size()) - 1;
      calls.at(event.call).needs_backward = event.needs_backward;
      calls.at(event.call).reads = event.reads;
    }
  }
  return calls;
}

std::vector<CallEvent> events_of(const PassCalls& calls) {
  std::vector<std::vector<int32_t>> left_after(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    if (calls[i].last >= 0) {
      left_after.at(calls[i].last).push_back(static_cast<int32_t>(i));
    }
  }
  std::vector<CallEvent> events;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (calls[i].last < 0) {
      continue;
    }
    events.push_back({EventKind::Enter, calls[i].unit, true, static_cast<int32_t>(i)});
    for (auto call = left_after[i].rbegin(); call != left_after[i].rend(); ++call) {
      const PassCall& left = calls[*call];
      events.push_back({EventKind::Exit, left.unit, left.needs_backward, *call, left.reads});
    }
  }
  return events;
}

PassCalls unite(const std::vector<PassCalls>& ranks) {
  PassCalls result = ranks.front();
  for (size_t i = 0; i < result.size(); ++i) {
    PassCall& call = result[i];
    for (const PassCalls& calls : ranks) {
      const PassCall& other = calls[i];
      if (other.made && !call.made) {
        call = other;
      } else if (other.made) {
        call.last = std::max(call.last, other.last);
        call.needs_backward = call.needs_backward || other.needs_backward;
      }
    }
  }
  return result;
}

NextCalls merge(const std::vector<PassCalls>& ranks, int own, bool keeps_unmade) {
  const std::vector<bool> kept =
      keeps_unmade ? kept_calls(unite(ranks)) : std::vector<bool>(ranks.front().size(), false);
  Merger merger(ranks.front());
  for (const PassCalls& calls : ranks) {
    merger.add(sequence_of(calls, kept));
  }
  NextCalls next;
  for (const UnitId unit : merger.units()) {
    const auto number = static_cast<int32_t>(next.calls.size());
    next.calls.push_back({unit, number, false, false, /*reads=*/false});
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const PassCalls& calls = ranks[rank];
    const auto places = merger.places_of(sequence_of(calls, kept));
    for (size_t i = 0; i < calls.size(); ++i) {
      if (places[i] >= 0) {
        PassCall& call = next.calls[places[i]];
        call.needs_backward = call.needs_backward || calls[i].needs_backward;
        call.reads = call.reads || calls[i].reads;
        call.last = calls[i].made ? std::max(call.last, places[calls[i].last]) : call.last;
      }
    }
    if (static_cast<int>(rank) == own) {
      next.places = places;
    }
  }
  return next;
}

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
  changed_ = true;
  auto number = static_cast<int32_t>(calls_.size());
  if (num_units_ == 0) {
    calls_.push_back({unit, number, grad_});
    return number;
  }
  number += unit;
  make_slots(num_added() + 1);
  calls_.at(number) = {unit, number, grad_};
  return number;
}

void CallOrder::make_slots(int64_t num_added) {
  while (this->num_added() < num_added) {
    for (size_t unit = 0; unit < num_units_; ++unit) {
      calls_.push_back({static_cast<UnitId>(unit), -1, false, false, /*reads=*/false});
    }
  }
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
  return std::any_of(calls_.begin(), calls_.end(), [](const PassCall& call) {
    return !call.made && call.last >= 0;
  });
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
