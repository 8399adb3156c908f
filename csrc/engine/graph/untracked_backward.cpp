#include "engine/graph/untracked_backward.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "common/math.h"

namespace zerocore {

namespace {

// RecordFunction takes a function without state, so this global holds the watchers to call.
struct Watches {
  std::mutex mutex;
  std::vector<std::shared_ptr<NodeWatch::Watcher>> on;
  at::CallbackHandle callback = 0;
};

Watches& watches() {
  static Watches* const all = new Watches; // autograd's threads may outlive static objects
  return *all;
}

std::unique_ptr<at::ObserverContext> before_node(const at::RecordFunction& node) {
  std::vector<std::shared_ptr<NodeWatch::Watcher>> on;
  {
    const std::lock_guard<std::mutex> lock(watches().mutex);
    on = watches().on;
  }
  for (const auto& watcher : on) {
    if (const auto alive = watcher->owner.lock()) { // keeps the model alive during the call
      watcher->seen({static_cast<uint64_t>(node.seqNr()), node.forwardThreadId()});
    }
  }
  return nullptr;
}

} // namespace

NodeWatch::~NodeWatch() {
  set_on(false);
}

void NodeWatch::set_on(bool on) {
  if (on_ == on) {
    return;
  }
  on_ = on;
  Watches& all = watches();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (!on) {
    all.on.erase(std::remove(all.on.begin(), all.on.end(), watcher_), all.on.end());
    if (all.on.empty()) {
      at::removeCallback(all.callback);
    }
    return;
  }
  all.on.push_back(watcher_);
  if (all.on.size() == 1) {
    all.callback = at::addGlobalCallback(
        at::RecordFunctionCallback(&before_node)
            .needsInputs(false)
            .scopes({at::RecordScope::BACKWARD_FUNCTION}));
  }
}

namespace {

constexpr size_t kMaxShapes = 4096; // a model with a new shape in each step stays watched

} // namespace

int64_t UntrackedBackward::add(const RecordedCall& call, bool recomputed) {
  if (!recomputed) {
    const uint64_t before = std::exchange(restarts_, false) ? 0 : calls_;
    calls_ = mix(mix(before, static_cast<uint64_t>(call.call.unit)), call.last - call.first);
  }
  const std::lock_guard lock(mutex_);
  visits_.push_back({call, recomputed});
  return first_visit_ + static_cast<int64_t>(visits_.size()) - 1;
}

void UntrackedBackward::expect_backward() {
  watch_.set_on(!visits_.empty());
}

void UntrackedBackward::begin_backward() {
  if (std::exchange(in_backward_, true)) {
    return;
  }
  found_ = false;
  const std::optional<BackwardCall> call = backward_call();
  is_known_ = call.has_value() && !visits_.empty();
  if (is_known_) {
    shape_ = mix(mix(calls_, call->next_node - visits_.back().recorded.last), call->roots);
  }
  watch_.set_on(!visits_.empty() && !(is_known_ && plain_.contains(shape_)));
}

void UntrackedBackward::keep_watching() {
  is_known_ = false;
  watch_.set_on(!visits_.empty());
}

void UntrackedBackward::announce(int64_t number) {
  const std::lock_guard lock(mutex_);
  if (number >= first_visit_ && number - first_visit_ < static_cast<int64_t>(visits_.size())) {
    visits_[number - first_visit_].announced = true;
    announced_.push_back(number);
  }
}

void UntrackedBackward::see(const GraphNode& node) {
  if (!runs_node_of(device_)) {
    return;
  }
  for (const auto& [index, visit] : visits_around(node)) {
    begin_backward();
    const RecordedCall& recorded = visit.recorded;
    if (watch_.is_on() && (!visit.announced || !is_usable_(recorded.call))) {
      announce(index);
      enter_(recorded);
      found_ = true;
    }
  }
}

// Returns the calls that contain the node, with their numbers. The outermost call comes first, like
// its backward.
std::vector<std::pair<int64_t, UntrackedBackward::Visit>> UntrackedBackward::visits_around(
    const GraphNode& node) const {
  std::vector<std::pair<int64_t, Visit>> around;
  const std::lock_guard lock(mutex_);
  for (auto index = static_cast<int64_t>(visits_.size()) - 1; index >= 0; --index) {
    const Visit& visit = visits_[index];
    if (visit.recorded.thread != node.thread) {
      continue;
    }
    if (visit.recorded.last <= node.number) {
      break; // calls that ended earlier lie before the node, too
    }
    if (visit.recorded.first <= node.number) {
      around.emplace_back(first_visit_ + index, visit);
    }
  }
  return around;
}

void UntrackedBackward::end_backward() {
  if (in_backward_ && is_known_ && watch_.is_on() && !found_) {
    if (plain_.size() >= kMaxShapes) {
      plain_.clear();
    }
    plain_.insert(shape_);
  }
  {
    const std::lock_guard lock(mutex_);
    for (const int64_t number : announced_) {
      if (number >= first_visit_) {
        visits_[number - first_visit_].announced = false;
      }
    }
    while (!visits_.empty() && visits_.back().recomputed) {
      visits_.pop_back();
    }
  }
  announced_.clear();
  in_backward_ = false;
  restarts_ = true;
  expect_backward(); // the user may have retained the graph
}

void UntrackedBackward::forget(int64_t oldest_pass) {
  const std::lock_guard lock(mutex_);
  while (!visits_.empty() && visits_.front().recorded.call.pass < oldest_pass) {
    visits_.pop_front();
    ++first_visit_;
  }
}

void UntrackedBackward::reset() {
  {
    const std::lock_guard lock(mutex_);
    first_visit_ += static_cast<int64_t>(visits_.size());
    visits_.clear();
  }
  announced_.clear();
  in_backward_ = false;
  restarts_ = true;
  watch_.set_on(false);
}

} // namespace zerocore
