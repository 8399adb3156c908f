// A thread that carries out transfers one after the other, each in the time it is given.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace zerocore {

// One end of a link. A job starts when it is submitted or when the one before it is over, whichever
// is last, and is over `duration_ns` after that: its transfer is part of this time. A transfer that
// takes longer delays the jobs behind it. The thread sleeps through nearly all of the time and is
// started by the first job; who owns a worker must stop() it.
class LinkWorker : public std::enable_shared_from_this<LinkWorker> {
  using Clock = std::chrono::steady_clock;

 public:
  struct Job {
    int64_t duration_ns = 0;
    std::function<void()> transfer;
    // Called on the worker's thread when the job is over, with what went wrong or null. Must not
    // throw. Every submitted job is finished exactly once.
    std::function<void(std::exception_ptr)> finish;
    Clock::time_point submitted = {}; // set by submit()
  };

  // Any thread. Throws c10::Error after stop().
  void submit(Job job);

  // Finishes all jobs with an error at once, also the one that waits, and joins the thread (but
  // not itself: called by a finish callback, the thread ends on its own). Any number of times.
  // The caller must hold no lock that a finish callback needs.
  void stop();

 private:
  void run();
  void carry_out(Job job);
  // False when stopped before.
  bool wait_until(Clock::time_point deadline);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> queue_;
  bool stopping_ = false;
  std::thread thread_;
  // Only the thread.
  Clock::time_point free_at_;
  Clock::duration lateness_ = Clock::duration::zero(); // of its wake-ups
};

} // namespace zerocore
