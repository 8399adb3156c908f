// The watchdog's threads.
#include "watch/watchdog.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>

namespace zerocore {

namespace {

constexpr std::chrono::milliseconds kEndPatience(1500); // at the end of the process
constexpr std::chrono::milliseconds kBusy(50); // between looks at a store while ranks talk

} // namespace

// Never destroyed: a thread that a dead store holds up may outlive the rest of the process.
Watchdog& Watchdog::of_process() {
  static std::atomic<Watchdog*> current = nullptr;
  Watchdog* watchdog = current.load();
  if (watchdog == nullptr || watchdog->process_ != getpid()) {
    auto* made = new Watchdog(getpid());
    if (current.compare_exchange_strong(watchdog, made)) {
      return *made;
    }
    delete made; // another thread was faster
  }
  return *watchdog;
}

Watchdog::Watch Watchdog::watch_of(const GroupWatch::Group& control, const std::string& name) {
  for (const auto& watch : watches()) {
    if (watch->is_of(control)) {
      return watch;
    }
  }
  auto watch = std::make_shared<GroupWatch>(name, control); // which connects to the store
  const std::lock_guard lock(mutex_);
  watches_.push_back(watch);
  if (!watcher_.joinable()) {
    watcher_ = std::thread([this] { this->watch(); });
    talker_ = std::thread([this] { talk(); });
    static const int registered = std::atexit([] { of_process().stop(); });
    static_cast<void>(registered);
  }
  return watch;
}

std::vector<Watchdog::Watch> Watchdog::watches() {
  const std::lock_guard lock(mutex_);
  return watches_;
}

Watchdog::Watch Watchdog::find(const std::string& group) {
  for (auto& watch : watches()) {
    if (watch->has_group(group)) {
      return watch;
    }
  }
  return nullptr;
}

void Watchdog::add_group(const std::string& group, const std::string& beside) {
  for (const auto& watch : watches()) {
    if (watch->has_group(beside) && !watch->has_group(group)) {
      watch->add_group(c10d::resolve_process_group(group));
    }
  }
}

void Watchdog::wake_watcher() {
  const std::lock_guard lock(mutex_);
  wakes_watcher_ = true;
  changed_.notify_all();
}

void Watchdog::wake() {
  const std::lock_guard lock(mutex_);
  wakes_watcher_ = wakes_talker_ = true;
  changed_.notify_all();
}

std::string Watchdog::waits_in_other_than(const GroupWatch& watch) {
  for (const auto& other : watches()) {
    std::string what = other.get() == &watch ? "" : other->waits_in();
    if (!what.empty()) {
      return what;
    }
  }
  return "";
}

void Watchdog::set_operation(std::string name) {
  const std::lock_guard lock(mutex_);
  operation_ = std::move(name);
}

std::string Watchdog::operation() {
  const std::lock_guard lock(mutex_);
  return operation_;
}

std::chrono::steady_clock::duration Watchdog::time_in_talk() const {
  using Clock = std::chrono::steady_clock;
  return talks_since_ ? Clock::now() - *talks_since_ : Clock::duration::zero();
}

std::chrono::steady_clock::duration Watchdog::talks_for() {
  const std::lock_guard lock(mutex_);
  return time_in_talk();
}

void Watchdog::note_end(const std::string& error) {
  std::unique_lock lock(mutex_);
  if (talker_.joinable() && time_in_talk() < kEndPatience) {
    end_ = error;
    changed_.notify_all();
    changed_.wait_for(lock, kEndPatience, [this] { return !end_; });
  }
}

void Watchdog::stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  const bool is_stuck = time_in_talk() > kEndPatience;
  const auto patience = is_stuck ? std::chrono::milliseconds(0) : kEndPatience;
  const bool ended = changed_.wait_for(lock, patience, [this] { return has_ended_talking_; });
  lock.unlock();
  if (watcher_.joinable()) {
    watcher_.join();
    ended ? talker_.join() : talker_.detach();
  }
}

void Watchdog::watch() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait_for(lock, interval_, [this] { return stopping_ || wakes_watcher_; });
    wakes_watcher_ = false;
    const auto watches = watches_;
    lock.unlock();
    auto interval = std::chrono::milliseconds(1000);
    for (const auto& watch : watches) {
      watch->tick();
      interval = std::min(interval, watch->interval());
    }
    lock.lock();
    interval_ = interval;
  }
}

// Watches of groups that were destroyed, once no model has them.
void Watchdog::drop_ended() {
  std::vector<Watch> ended;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(watches_, [&](Watch& watch) {
      const bool is_over = watch.use_count() == 1 && watch->is_over();
      return is_over && (ended.push_back(watch), true);
    });
  }
  for (const auto& watch : ended) {
    watch->note_end("");
  }
}

void Watchdog::talk() {
  std::unique_lock lock(mutex_);
  bool is_busy = false;
  while (!stopping_) {
    changed_.wait_for(
        lock, is_busy ? kBusy : interval_, [this] { return stopping_ || wakes_talker_ || end_; });
    wakes_talker_ = false;
    auto watches = watches_;
    const std::optional<std::string> end = end_;
    talks_since_ = std::chrono::steady_clock::now();
    lock.unlock();
    is_busy = false;
    for (const auto& watch : watches) {
      end ? watch->note_end(*end) : watch->talk();
      is_busy = is_busy || watch->is_talking();
    }
    watches.clear();
    drop_ended();
    lock.lock();
    talks_since_.reset();
    if (end) {
      end_.reset();
      changed_.notify_all();
    }
  }
  has_ended_talking_ = true;
  changed_.notify_all();
}

} // namespace zerocore
