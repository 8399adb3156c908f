// A thread that runs submitted work in order.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <omp.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device/trace.h"

namespace zerocore {

// Sets the number of threads, including this one, that share the calling thread's loops
// (at::parallel_for). Other threads keep their number; at::set_num_threads() would change the
// default of threads that start later.
inline void use_host_threads(int num_threads) {
  TORCH_CHECK_VALUE(num_threads >= 1, "expected 1 thread or more, got ", num_threads);
  at::get_num_threads(); // a thread's first call sets torch's default
  omp_set_num_threads(num_threads);
}

// Only one thread may submit and wait. The worker's thread starts with the first work, and shares
// its loops among `num_threads` threads. Its current device is `device`: without one, a wait for an
// event would create a context on GPU 0.
class StepWorker {
 public:
  using Work = std::function<void()>;
  using Ticket = int64_t; // number of submitted work, from 1 on

  StepWorker(c10::Device device, int num_threads) : device_(device), num_threads_(num_threads) {}
  // Waits for all work.
  ~StepWorker();

  Ticket submit(Work work);
  // submit() that also writes the work's times to `record` unless it is null.
  Ticket submit(std::shared_ptr<OpenRecord> record, Work work);
  // Returns the ticket of the last submitted work.
  Ticket last() const {
    return submitted_;
  }
  // Waits until this work and all earlier work have ended or failed. Adds the waiting time to
  // `record` unless it is null.
  void wait(Ticket ticket, const std::shared_ptr<OpenRecord>& record = nullptr);
  // Returns and forgets the first error, or null.
  std::exception_ptr take_error();

 private:
  void run();

  const c10::Device device_;
  const int num_threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  // Done work, which wait() frees. Freeing a Python tensor takes the GIL, which the waiting thread
  // may hold.
  std::vector<Work> spent_;
  Ticket submitted_ = 0, done_ = 0;
  std::exception_ptr error_;
  bool stopping_ = false;
  std::thread thread_;
};

} // namespace zerocore
