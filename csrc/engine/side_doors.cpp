// See Note [Side doors].
#include "engine/side_doors.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

namespace zerocore {

namespace {

constexpr size_t kMaxShapes = 4096; // a model whose shape never repeats stays watched

uint64_t mix(uint64_t shape, uint64_t value) {
  return (shape ^ value) * 0x9E3779B97F4A7C15ULL + 1;
}

void remember(std::unordered_set<uint64_t>& shapes, uint64_t shape) {
  if (shapes.size() >= kMaxShapes) {
    shapes.clear();
  }
  shapes.insert(shape);
}

} // namespace

SideDoors::SideDoors(Enter enter)
    : enter_(std::move(enter)),
      watch_([this](uint64_t number, uint64_t thread) { see(number, thread); }) {}

int64_t SideDoors::add(const RecordedCall& call) {
  if (std::exchange(settled_, false)) {
    calls_ = 0;
  }
  calls_ = mix(mix(calls_, static_cast<uint64_t>(call.call.unit)), call.last - call.first);
  thread_ = at::RecordFunction::currentThreadId();
  visits_.push_back({call});
  return first_visit_ + static_cast<int64_t>(visits_.size()) - 1;
}

void SideDoors::expect_backward() {
  watch_.set_on(!visits_.empty() && !plain_calls_.contains(calls_));
}

void SideDoors::begin_backward(std::optional<uint64_t> next_node) {
  in_backward_ = true;
  found_ = false;
  const uint64_t after = visits_.empty() || !next_node ? 0 : *next_node - visits_.back().recorded.last;
  backward_ = mix(calls_, after);
  watch_.set_on(!visits_.empty() && !(next_node && plain_backwards_.contains(backward_)));
}

void SideDoors::announce(int64_t number) {
  if (number >= first_visit_ && number - first_visit_ < static_cast<int64_t>(visits_.size())) {
    visits_[number - first_visit_].announced = true;
    announced_.push_back(number);
  }
}

void SideDoors::see(uint64_t number, uint64_t thread) {
  if (thread != thread_) {
    return;
  }
  const auto after = std::upper_bound(
      visits_.begin(), visits_.end(), number, [](uint64_t node, const Visit& visit) {
        return node < visit.recorded.last;
      });
  // The outermost call is left last and its backward comes first.
  for (auto index = static_cast<int64_t>(visits_.size()) - 1; index >= after - visits_.begin();
       --index) {
    const Visit& visit = visits_[index];
    if (!visit.announced && visit.recorded.first <= number) {
      const RecordedCall recorded = visit.recorded;
      announce(first_visit_ + index);
      enter_(recorded);
      found_ = true;
      watch_.set_on(true); // the shape was seen before, and yet there is one
    }
  }
}

void SideDoors::end_backward() {
  if (found_) {
    remember(shapes_with_doors_, calls_);
    plain_calls_.erase(calls_);
  } else if (in_backward_ && watch_.is_on()) {
    remember(plain_backwards_, backward_);
    if (!shapes_with_doors_.contains(calls_)) {
      remember(plain_calls_, calls_);
    }
  }
  for (const int64_t number : announced_) {
    if (number >= first_visit_) {
      visits_[number - first_visit_].announced = false;
    }
  }
  announced_.clear();
  in_backward_ = false;
  settled_ = true;
  watch_.set_on(false);
}

void SideDoors::forget(int64_t oldest_pass) {
  while (!visits_.empty() && visits_.front().recorded.call.pass < oldest_pass) {
    visits_.pop_front();
    ++first_visit_;
  }
}

void SideDoors::reset() {
  first_visit_ += static_cast<int64_t>(visits_.size());
  visits_.clear();
  announced_.clear();
  in_backward_ = false;
  settled_ = true;
  watch_.set_on(false);
}

} // namespace zerocore
