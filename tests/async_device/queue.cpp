// Runs the streams' tasks, with delays, and notes their waits and errors.
#include "queue.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <map>

namespace async_device {

namespace {

// The state that the host's threads share. Never destroyed: streams outlive the interpreter.
struct Shared {
  std::mutex mutex;
  std::array<std::unique_ptr<Queue>, kNumStreams> queues;
  Delays delays;
  int next = 0;
  std::exception_ptr error;
  bool waits_are_forbidden = false;
  std::map<std::string, int64_t> host_waits;
  bool notes_waits = false;
  int64_t dropped = -1, dropped_of_host = -1;
  std::vector<Wait> waits, waits_of_host;
};

Shared& shared() {
  static auto& instance = *new Shared();
  return instance;
}

thread_local int the_current_stream = 0;
thread_local Queue* the_working_queue = nullptr;
thread_local bool has_device = false;
thread_local std::shared_ptr<Recording> the_recording;

} // namespace

void Point::reach() {
  {
    const std::lock_guard lock(mutex_);
    reached_ = true;
    time_ = Clock::now();
  }
  changed_.notify_all();
}

void Point::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

bool Point::is_reached() {
  const std::lock_guard lock(mutex_);
  return reached_;
}

Clock::time_point Point::time() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(reached_, "the event was not reached yet");
  return time_;
}

Queue::Queue(int id) : id(id), thread_([this] { work(); }) {}

void Queue::push(Task task, bool delayed) {
  {
    const std::lock_guard lock(mutex_);
    items_.push_back({std::move(task), delayed});
  }
  changed_.notify_one();
}

PointPtr Queue::record() {
  auto point = std::make_shared<Point>(id);
  push([point] { point->reach(); }, /*delayed=*/false);
  return point;
}

void Queue::wait_for(const PointPtr& point) {
  if (point->stream != id) {
    push([point] { point->wait(); }, /*delayed=*/false);
  }
}

bool Queue::is_idle() {
  const std::lock_guard lock(mutex_);
  return items_.empty() && !busy_;
}

void Queue::set_delays(const Delays& delays) {
  const std::lock_guard lock(mutex_);
  delays_ = delays;
  random_.seed(delays.seed * kNumStreams + static_cast<uint64_t>(id));
}

void Queue::set_lag(int us) {
  const std::lock_guard lock(mutex_);
  lag_us_ = us;
}

void Queue::pause() {
  int us = 0;
  {
    const std::lock_guard lock(mutex_);
    us = draw_delay();
  }
  std::this_thread::sleep_for(std::chrono::microseconds(us));
}

int Queue::draw_delay() {
  int us = lag_us_;
  if (delays_.share > 0 && std::uniform_real_distribution<>(0, 1)(random_) < delays_.share) {
    us += std::uniform_int_distribution<>(0, delays_.longest_us)(random_);
  }
  return us;
}

void Queue::work() {
  the_working_queue = this;
  at::set_num_threads(1); // sums have one order, and streams share the cores
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !items_.empty(); });
    Item item = std::move(items_.front());
    items_.pop_front();
    busy_ = true;
    const int us = item.delayed ? draw_delay() : 0;
    lock.unlock();
    if (us > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(us));
    }
    try {
      item.run();
    } catch (...) {
      const std::lock_guard error_lock(shared().mutex);
      shared().error = std::current_exception();
    }
    item.run = nullptr; // frees what it holds before the stream counts as idle
    lock.lock();
    busy_ = false;
  }
}

Queue& queue(int id) {
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  std::unique_ptr<Queue>& found = all.queues.at(static_cast<size_t>(id));
  if (found == nullptr) {
    found = std::make_unique<Queue>(id);
    found->set_delays(all.delays);
  }
  return *found;
}

Queue& working_queue() {
  return *the_working_queue;
}

int next_stream() {
  const std::lock_guard lock(shared().mutex);
  return 1 + shared().next++ % (kNumStreams - 1);
}

void set_delays(const Delays& delays) {
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  all.delays = delays;
  for (const auto& each : all.queues) {
    if (each != nullptr) {
      each->set_delays(delays);
    }
  }
}

int current_stream() {
  return the_current_stream;
}

int exchange_stream(int id) {
  return std::exchange(the_current_stream, id);
}

void launch(Task task) {
  if (the_recording != nullptr) {
    the_recording->tasks.push_back(task);
  }
  queue(current_stream()).push(std::move(task));
}

void begin_recording() {
  the_recording = std::make_shared<Recording>();
}

std::shared_ptr<Recording> end_recording() {
  return std::exchange(the_recording, nullptr);
}

bool is_recording() {
  return the_recording != nullptr;
}

void check_not_recording(const char* what) {
  TORCH_CHECK(!is_recording(), what, " in recorded work");
}

std::atomic<int>& capturing_stream() {
  static std::atomic<int> stream = -1;
  return stream;
}

void choose_device() noexcept {
  has_device = true;
}

void note_host_wait(const char* what) {
  check_not_recording(what);
  const std::lock_guard lock(shared().mutex);
  ++shared().host_waits[what];
  if (!has_device) {
    ++shared().host_waits[std::string(what) + ", without a device"];
  }
  TORCH_CHECK(!shared().waits_are_forbidden, "the host waits for the device: ", what);
}

void forbid_host_waits(bool forbidden) {
  const std::lock_guard lock(shared().mutex);
  shared().waits_are_forbidden = forbidden;
}

std::vector<std::pair<std::string, int64_t>> host_waits() {
  const std::lock_guard lock(shared().mutex);
  return {shared().host_waits.begin(), shared().host_waits.end()};
}

void check_error() {
  const std::lock_guard lock(shared().mutex);
  if (shared().error != nullptr) {
    std::rethrow_exception(std::exchange(shared().error, nullptr));
  }
}

void wait_for_point(const PointPtr& point) {
  point->wait();
  check_error();
}

void wait_for_stream(int id) {
  wait_for_point(queue(id).record());
}

void wait_for_device() {
  std::vector<PointPtr> points;
  for (int id = 0; id < kNumStreams; ++id) {
    points.push_back(queue(id).record());
  }
  for (const PointPtr& point : points) {
    point->wait();
  }
  check_error();
}

void begin_waits(int64_t dropped, int64_t dropped_of_host) {
  const std::lock_guard lock(shared().mutex);
  shared().notes_waits = true;
  shared().dropped = dropped;
  shared().dropped_of_host = dropped_of_host;
  shared().waits.clear();
  shared().waits_of_host.clear();
}

std::vector<Wait> end_waits() {
  const std::lock_guard lock(shared().mutex);
  shared().notes_waits = false;
  std::vector<Wait> all = std::move(shared().waits);
  all.insert(all.end(), shared().waits_of_host.begin(), shared().waits_of_host.end());
  return all;
}

bool note_wait(const Wait& wait) {
  const std::lock_guard lock(shared().mutex);
  if (!shared().notes_waits || wait.waiter == wait.source) {
    return true;
  }
  const bool is_host = wait.waiter == kHost;
  std::vector<Wait>& waits = is_host ? shared().waits_of_host : shared().waits;
  waits.push_back(wait);
  const int64_t dropped = is_host ? shared().dropped_of_host : shared().dropped;
  return static_cast<int64_t>(waits.size()) - 1 != dropped;
}

} // namespace async_device
