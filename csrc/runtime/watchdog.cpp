// The watchdog's thread.
#include "runtime/watchdog.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>

#include "runtime/alarm.h"

namespace zerocore {

namespace {

constexpr std::chrono::milliseconds kEndPatience(2500); // at the end of the process

} // namespace

// Never destroyed: a thread that a dead store holds up may outlive the rest of the process.
Watchdog& Watchdog::of_process() {
  static std::atomic<Watchdog*> current = nullptr;
  Watchdog* watchdog = current.load();
  if (watchdog == nullptr || !watchdog->is_of_this_process()) {
    auto* made = new Watchdog(getpid());
    if (current.compare_exchange_strong(watchdog, made)) {
      return *made;
    }
    delete made; // another thread was faster
  }
  return *watchdog;
}

bool Watchdog::is_of_this_process() const {
  return process_ == getpid();
}

void Watchdog::add(std::shared_ptr<Alarm> alarm, std::chrono::milliseconds interval) {
  const std::lock_guard lock(mutex_);
  alarms_.push_back(std::move(alarm));
  interval_ = std::min(interval_, interval);
  if (!thread_.joinable()) {
    start();
  }
  changed_.notify_all();
}

void Watchdog::start() {
  thread_ = std::thread([this] { run(); });
  static const int registered = std::atexit([] { of_process().stop(); });
  static_cast<void>(registered);
}

bool Watchdog::remove(const Alarm* alarm) {
  const std::lock_guard lock(mutex_);
  return std::erase_if(alarms_, [&](const auto& each) { return each.get() == alarm; }) > 0;
}

void Watchdog::wake() {
  const std::lock_guard lock(mutex_);
  woken_ = true;
  changed_.notify_all();
}

std::string Watchdog::waits_in_other_than(const Alarm& alarm) {
  const std::lock_guard lock(mutex_);
  for (const auto& other : alarms_) {
    if (other.get() != &alarm) {
      const std::string what = other->waits_in();
      if (!what.empty()) {
        return what;
      }
    }
  }
  return "";
}

void Watchdog::note_end(const std::string& how) {
  std::unique_lock lock(mutex_);
  if (!thread_.joinable()) {
    return;
  }
  end_ = how;
  changed_.notify_all();
  changed_.wait_for(lock, kEndPatience, [this] { return !end_; });
}

void Watchdog::stop() {
  std::unique_lock lock(mutex_);
  if (!thread_.joinable()) {
    return;
  }
  stopping_ = true;
  changed_.notify_all();
  if (changed_.wait_for(lock, kEndPatience, [this] { return finished_; })) {
    lock.unlock();
    thread_.join();
  } else {
    thread_.detach();
  }
}

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait_for(lock, interval_, [this] { return stopping_ || woken_ || end_; });
    woken_ = false;
    const auto alarms = alarms_;
    const std::optional<std::string> end = end_;
    lock.unlock();
    for (const auto& alarm : alarms) {
      alarm->tick();
      if (end) {
        alarm->note_end(*end);
      }
    }
    lock.lock();
    if (end) {
      end_.reset();
      changed_.notify_all();
    }
  }
  finished_ = true;
  changed_.notify_all();
}

} // namespace zerocore
