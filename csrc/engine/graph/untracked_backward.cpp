// See Note [Untracked backward].
#include "engine/graph/untracked_backward.h"

#include <ATen/record_function.h>

#include "common/math.h"
#include "engine/graph/autograd.h"

namespace zerocore {

namespace {

constexpr size_t kMaxShapes = 4096; // a model whose shape never repeats stays watched

} // namespace

int64_t UntrackedBackward::add(const RecordedCall& call) {
  if (std::exchange(settled_, false)) {
    calls_ = 0;
  }
  calls_ = mix(mix(calls_, static_cast<uint64_t>(call.call.unit)), call.last - call.first);
  thread_ = at::RecordFunction::currentThreadId();
  return note(call, /*recomputed=*/false);
}

int64_t UntrackedBackward::add_recomputed(const RecordedCall& call) {
  recomputing_thread_ = at::RecordFunction::currentThreadId();
  return note(call, /*recomputed=*/true);
}

int64_t UntrackedBackward::note(const RecordedCall& call, bool recomputed) {
  visits_.push_back({call, at::RecordFunction::currentThreadId(), recomputed});
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
  if (number >= first_visit_ && number - first_visit_ < static_cast<int64_t>(visits_.size())) {
    visits_[number - first_visit_].announced = true;
    announced_.push_back(number);
  }
}

void UntrackedBackward::see(uint64_t number, uint64_t thread) {
  if (thread == thread_ && !in_backward_) {
    begin_backward();
  }
  if ((thread == thread_ || thread == recomputing_thread_) && watch_.is_on()) {
    look_up(number, thread);
  }
}

void UntrackedBackward::look_up(uint64_t number, uint64_t thread) {
  // The outermost call is left last and its backward comes first.
  for (auto index = static_cast<int64_t>(visits_.size()) - 1; index >= 0; --index) {
    const Visit& visit = visits_[index];
    if (visit.thread != thread) {
      continue;
    }
    if (visit.recorded.last <= number) {
      break; // as are those before it
    }
    const bool contains = visit.recorded.first <= number;
    if (contains && (!visit.announced || !is_usable_(visit.recorded.call))) {
      const RecordedCall recorded = visit.recorded;
      announce(first_visit_ + index);
      enter_(recorded);
      found_ = true;
    }
  }
}

void UntrackedBackward::end_backward() {
  if (in_backward_ && is_known_ && watch_.is_on() && !found_) {
    if (plain_.size() >= kMaxShapes) {
      plain_.clear();
    }
    plain_.insert(shape_);
  }
  for (const int64_t number : announced_) {
    if (number >= first_visit_) {
      visits_[number - first_visit_].announced = false;
    }
  }
  announced_.clear();
  while (!visits_.empty() && visits_.back().recomputed) {
    visits_.pop_back();
  }
  recomputing_thread_ = 0;
  in_backward_ = false;
  settled_ = true;
  expect_backward(); // through a graph that was retained
}

void UntrackedBackward::forget(int64_t oldest_pass) {
  while (!visits_.empty() && visits_.front().recorded.call.pass < oldest_pass) {
    visits_.pop_front();
    ++first_visit_;
  }
}

void UntrackedBackward::reset() {
  first_visit_ += static_cast<int64_t>(visits_.size());
  visits_.clear();
  announced_.clear();
  recomputing_thread_ = 0;
  in_backward_ = false;
  settled_ = true;
  watch_.set_on(false);
}

} // namespace zerocore
