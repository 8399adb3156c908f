// A thread that carries out work for units, one piece after the other.
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

// How many threads share the loops that the calling thread runs, of that one alone:
// at::parallel_for, which the CPU's kernels use, gives its work to up to so many threads, this one
// included. Other threads keep theirs, also those that are started later; at::set_num_threads()
// would be the default of these.
inline void use_host_threads(int num_threads) {
  TORCH_CHECK_VALUE(num_threads >= 1, "expected 1 thread or more, got ", num_threads);
  at::get_num_threads(); // the first call of a thread sets what torch would
  omp_set_num_threads(num_threads);
}

// One thread submits and waits. The thread of the worker begins with the first piece of work, and
// gives the CPU's loops to `num_threads`, itself included. Its current device is `device`: a wait
// of a thread that has chosen none makes a context on GPU 0.
class StepWorker {
 public:
  using Work = std::function<void()>;
  using Ticket = int64_t; // 0 is of no work

  StepWorker(c10::Device device, int num_threads) : device_(device), num_threads_(num_threads) {}
  // Ends when all work is done.
  ~StepWorker();

  Ticket submit(Work work);
  // The same; `record`, if there is one, gets its times.
  Ticket submit(std::shared_ptr<OpenRecord> record, Work work);
  // Of what was submitted last.
  Ticket last() const {
    return submitted_;
  }
  // Blocks until the work of that ticket, and all before it, is done, well or not. `record`, if
  // there is one, gets for how long.
  void wait(Ticket ticket, const std::shared_ptr<OpenRecord>& record = nullptr);
  // The first error, once; null for none.
  std::exception_ptr take_error();

 private:
  void run();

  const c10::Device device_;
  const int num_threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  // Freed by who waits: a tensor may belong to Python, whose lock that thread may hold.
  std::vector<Work> spent_;
  Ticket submitted_ = 0, done_ = 0;
  std::exception_ptr error_;
  bool stopping_ = false;
  std::thread thread_;
};

} // namespace zerocore
