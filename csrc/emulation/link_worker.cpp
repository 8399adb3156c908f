// The worker thread of the emulated link.
#include "emulation/link_worker.h"

#include <c10/util/Exception.h>
#include <sys/prctl.h>

#include <algorithm>
#include <utility>

namespace zerocore {

namespace {

// Waited awake, as wake-ups vary by about this much.
constexpr auto kSpin = std::chrono::microseconds(40);
// No more than this is believed to be how late the system wakes a thread.
constexpr auto kMaxLateness = std::chrono::microseconds(500);

std::exception_ptr stopped_error() {
  return std::make_exception_ptr(
      c10::DistBackendError(
          {__func__, __FILE__, __LINE__},
          "the emulated group was destroyed before the collective was done"));
}

} // namespace

void LinkWorker::submit(Job job) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(
      DistBackendError, !stopping_, "the emulated group was destroyed; make a new one");
  job.submitted = Clock::now();
  queue_.push_back(std::move(job));
  if (!thread_.joinable()) {
    thread_ = std::thread([self = shared_from_this()] { self->run(); });
  }
  changed_.notify_one();
}

void LinkWorker::stop() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    std::swap(thread, thread_);
  }
  changed_.notify_all();
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else if (thread.joinable()) {
    thread.join();
  }
}

void LinkWorker::run() {
  prctl(PR_SET_TIMERSLACK, 1); // alarms are not put off to be bundled with others
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    Job next = std::move(queue_.front());
    queue_.pop_front();
    const bool stopping = stopping_;
    lock.unlock();
    if (stopping) {
      next.finish(stopped_error());
    } else {
      carry_out(std::move(next));
    }
    // Before locking: what the job holds may free anything.
    next = {};
    lock.lock();
  }
}

void LinkWorker::carry_out(Job job) {
  free_at_ = std::max(job.submitted, free_at_) + std::chrono::nanoseconds(job.duration_ns);
  std::exception_ptr error;
  try {
    job.transfer();
  } catch (...) {
    error = std::current_exception();
  }
  // Waking up late must not delay the next job, a transfer that took too long must.
  free_at_ = std::max(free_at_, Clock::now());
  if (!wait_until(free_at_)) {
    error = stopped_error();
  }
  job.finish(error);
}

bool LinkWorker::wait_until(Clock::time_point deadline) {
  // An idle processor of a virtual machine takes up to a few hundred microseconds to wake up, so
  // the alarm is set as much earlier as the last ones were late.
  const auto alarm = deadline - kSpin - lateness_;
  if (Clock::now() < alarm) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_until(lock, alarm, [this] { return stopping_; })) {
      return false;
    }
    const auto late = std::min<Clock::duration>(Clock::now() - alarm, kMaxLateness);
    lateness_ += (late - lateness_) / 8;
  }
  while (Clock::now() < deadline) {
  }
  return true;
}

} // namespace zerocore
