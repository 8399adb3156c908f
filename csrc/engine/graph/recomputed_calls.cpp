#include "engine/graph/recomputed_calls.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace zerocore {

namespace {

bool is_before(const CallHandle& a, const CallHandle& b) {
  return std::pair(a.pass, a.call) < std::pair(b.pass, b.call);
}

} // namespace

void RecomputedCalls::add(const RecordedCall& call, bool has_graph, bool again) {
  calls_.push_back({call, has_graph, again});
}

RecomputedCalls::Found RecomputedCalls::find(UnitId unit) {
  const std::optional<GraphNode> node = current_node();
  if (!node) {
    return {{}, {-1, -1, unit}};
  }
  const int64_t backward = current_backward();
  if (*node != node_ || backward != backward_) {
    node_ = *node;
    backward_ = backward;
    look_behind();
  }
  const auto made = std::ranges::find_if(
      group_, [&](const Made* each) { return each->recorded.call.unit == unit; });
  if (made == group_.end()) {
    return {position_, {-1, -1, unit}};
  }
  (*made)->found = true;
  const CallHandle call = (*made)->recorded.call;
  group_.erase(group_.begin(), made + 1);
  return {position_, call};
}

// Finds the checkpoint's calls among those that the backward is past, and its position.
void RecomputedCalls::look_behind() {
  position_ = {};
  group_.clear();
  std::optional<CallHandle> next; // the first call whose backward has run
  int64_t pass = -1; // the last pass with a call that began before the node
  for (auto made = calls_.rbegin(); made != calls_.rend(); ++made) {
    const RecordedCall& recorded = made->recorded;
    if (recorded.thread != node_.thread || recorded.call.pass < 0) {
      continue;
    }
    if (recorded.first <= node_.number) {
      pass = std::max(pass, recorded.call.pass);
      if (recorded.last <= node_.number) {
        break; // calls that ended earlier lie before the node, too
      }
      continue; // the node is inside the call
    }
    if (!made->has_graph && !made->found) {
      group_.push_back(&*made);
    } else if (!next || is_before(recorded.call, *next)) {
      next = recorded.call;
    }
  }
  if (next) {
    std::erase_if(group_, [&](const Made* made) { return !is_before(made->recorded.call, *next); });
    position_ = {next->pass, next->call};
  } else if (group_.empty()) {
    position_ = position_behind(pass);
  }
  std::sort(group_.begin(), group_.end(), [](const Made* a, const Made* b) {
    return is_before(a->recorded.call, b->recorded.call);
  });
  if (!group_.empty()) {
    std::erase_if(group_, [first = group_.front()->recorded.call.pass](const Made* made) {
      return made->recorded.call.pass != first;
    });
    position_ = {group_.back()->recorded.call.pass, group_.back()->recorded.call.call + 1};
  }
}

// Returns the position after all calls of the pass that began before the node.
BackwardPosition RecomputedCalls::position_behind(int64_t pass) const {
  BackwardPosition position{pass, 0};
  for (const Made& made : calls_) {
    const RecordedCall& recorded = made.recorded;
    const bool is_of_pass = recorded.thread == node_.thread && recorded.call.pass == pass;
    if (is_of_pass && recorded.first <= node_.number) {
      position.end = std::max(position.end, recorded.call.call + 1);
    }
  }
  return position;
}

void RecomputedCalls::end_backward() {
  while (!calls_.empty() && calls_.back().again) {
    calls_.pop_back();
  }
  for (Made& made : calls_) {
    made.found = false;
  }
  group_.clear();
  backward_ = -1;
}

void RecomputedCalls::forget(int64_t oldest_pass) {
  while (!calls_.empty() && calls_.front().recorded.call.pass < oldest_pass) {
    calls_.pop_front();
  }
}

void RecomputedCalls::reset() {
  calls_.clear();
  end_backward();
}

} // namespace zerocore
