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
  if (!watcher_.thread.joinable()) {
    for (Worker* worker : {&watcher_, &talker_}) {
      worker->thread = std::thread([this, worker] { run(*worker); });
    }
    static const int registered = std::atexit([] { of_process().stop(); });
    static_cast<void>(registered);
  }
  changed_.notify_all();
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

void Watchdog::wake() {
  const std::lock_guard lock(mutex_);
  watcher_.woken = talker_.woken = true;
  changed_.notify_all();
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
  if (talker_.thread.joinable() && !talker_.is_stuck()) {
    end_ = how;
    changed_.notify_all();
    changed_.wait_for(lock, kEndPatience, [this] { return !end_; });
  }
}

void Watchdog::stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  end(watcher_, lock);
  end(talker_, lock);
}

void Watchdog::end(Worker& worker, std::unique_lock<std::mutex>& lock) {
  if (!worker.thread.joinable()) {
    return;
  }
  const auto patience = worker.is_stuck() ? std::chrono::milliseconds(0) : kEndPatience;
  if (changed_.wait_for(lock, patience, [&] { return worker.finished; })) {
    lock.unlock();
    worker.thread.join();
    lock.lock();
  } else {
    worker.thread.detach();
  }
}

bool Watchdog::Worker::is_stuck() const {
  return busy_since && std::chrono::steady_clock::now() - *busy_since > kEndPatience;
}

void Watchdog::run(Worker& worker) {
  const bool talks = &worker == &talker_;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait_for(
        lock, interval_, [&] { return stopping_ || worker.woken || (talks && end_); });
    worker.woken = false;
    worker.busy_since = std::chrono::steady_clock::now();
    const auto alarms = alarms_;
    const std::optional<std::string> end = end_;
    lock.unlock();
    for (const auto& alarm : alarms) {
      if (!talks) {
        alarm->tick();
      } else if (end) {
        alarm->note_end(*end);
      } else {
        alarm->talk();
      }
    }
    lock.lock();
    worker.busy_since.reset();
    if (talks && end) {
      end_.reset();
      changed_.notify_all();
    }
  }
  worker.finished = true;
  changed_.notify_all();
}

} // namespace zerocore
