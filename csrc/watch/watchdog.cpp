// The watchdog's threads.
#include "watch/watchdog.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "watch/alarm.h"

namespace zerocore {

namespace {

constexpr std::chrono::milliseconds kEndPatience(1500); // at the end of the process
constexpr std::chrono::milliseconds kInCall(100); // between looks at the store

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

void Watchdog::add(std::shared_ptr<Alarm> alarm) {
  const std::lock_guard lock(mutex_);
  interval_ = std::min(interval_, alarm->interval());
  alarms_.push_back(std::move(alarm));
  for (; num_running_ < 2; ++num_running_) {
    threads_.emplace_back([this, talks = num_running_ == 1] { run(talks); });
  }
  static const int registered = std::atexit([] { of_process().stop(); });
  static_cast<void>(registered);
}

bool Watchdog::remove(const Alarm* alarm) {
  const std::lock_guard lock(mutex_);
  return std::erase_if(alarms_, [&](const auto& each) { return each.get() == alarm; }) > 0;
}

std::vector<std::shared_ptr<Alarm>> Watchdog::alarms() {
  const std::lock_guard lock(mutex_);
  return alarms_;
}

std::shared_ptr<Alarm> Watchdog::alarm_of(const std::string& group) {
  for (auto& alarm : alarms()) {
    if (alarm->has_group(group)) {
      return alarm;
    }
  }
  return nullptr;
}

void Watchdog::add_group(const std::string& group, const std::string& beside) {
  for (const auto& alarm : alarms()) {
    if (alarm->has_group(beside) && !alarm->has_group(group)) {
      alarm->add_group(c10d::resolve_process_group(group));
    }
  }
}

std::string Watchdog::waits_in_other_than(const Alarm& alarm) {
  for (const auto& other : alarms()) {
    std::string what = other.get() == &alarm ? "" : other->waits_in();
    if (!what.empty()) {
      return what;
    }
  }
  return "";
}

std::vector<ModelPosition> Watchdog::positions() {
  std::vector<ModelPosition> result;
  for (const auto& alarm : alarms()) {
    if (auto position = alarm->position()) {
      result.push_back(std::move(*position));
    }
  }
  return result;
}

void Watchdog::note_end(const std::string& how) {
  std::unique_lock lock(mutex_);
  if (num_running_ > 0) {
    end_ = how;
    changed_.notify_all();
    changed_.wait_for(lock, kEndPatience, [this] { return !end_; });
  }
}

void Watchdog::stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  const bool ended = changed_.wait_for(lock, kEndPatience, [this] { return num_running_ == 0; });
  lock.unlock();
  for (std::thread& thread : threads_) {
    ended ? thread.join() : thread.detach();
  }
}

void Watchdog::run(bool talks) {
  std::unique_lock lock(mutex_);
  for (bool in_call = false; !stopping_;) {
    const auto alarms = alarms_;
    const std::optional<std::string> end = talks ? end_ : std::nullopt;
    lock.unlock();
    in_call = false;
    for (const auto& alarm : alarms) {
      if (!talks) {
        alarm->tick();
      } else if (end) {
        alarm->note_end(*end);
      } else {
        in_call = alarm->talk() || in_call;
      }
    }
    lock.lock();
    if (end) {
      end_.reset();
      changed_.notify_all();
    }
    if (!stopping_ && !(talks && end_)) {
      changed_.wait_for(lock, in_call ? std::min(kInCall, interval_) : interval_);
    }
  }
  --num_running_;
  changed_.notify_all();
}

} // namespace zerocore
