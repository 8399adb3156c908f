// The emulated link, on which each collective takes as long as on a real link.
//
// Note [Time on the link]
// LinkModel gives the duration of a collective, including its real memory traffic. On the CPU,
// collectives run in the order of issue, on one thread that mostly sleeps. On a device, kernels
// book the link and wait, on the current stream (asyncOp = false) or a stream of the communicator.
// Collectives of a communicator run in the order of issue, like NCCL's, whichever stream is late.
// Two communicators of the same ranks share the link: the first stream to reach it goes first.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "emulation/emulated_work.h"

namespace zerocore {

// -- the duration of a collective, by formula
// ------------------------------------------------------

// A link between the ranks of a group.
struct LinkModel {
  double bandwidth = std::numeric_limits<double>::infinity(); // bytes per second and direction
  double latency = 0.0; // seconds per call
  int sms = 0; // multiprocessors that a collective occupies on a GPU; 0 = one thread

  // Throws ValueError for an impossible bandwidth, latency or number of multiprocessors.
  void validate() const;
};

enum class Traffic : uint8_t {
  AllGather,
  ReduceScatter,
  AllReduce,
  AllToAll,
  Gather,
  Scatter,
  Broadcast,
  Reduce,
  Barrier,
};

// Returns the time in which the bytes of one collective cross the link, without latency.
double transfer_ns(const LinkModel& link, Traffic traffic, int64_t nbytes, int64_t world_size);

// Returns latency + transfer, in whole nanoseconds. Coalesced calls pay the latency once.
int64_t duration_ns(const LinkModel& link, double transfer_ns);

// -- a thread that carries out transfers, each in a given time
// --------------------------------------

// One end of a link. A job starts when it is submitted or when the previous job ends, whichever is
// later. It ends `duration_ns` after that, including its transfer. A transfer that takes longer
// delays later jobs. The first job starts the thread, which sleeps nearly all of the time. The
// owner of a worker must stop() it.
class LinkWorker : public std::enable_shared_from_this<LinkWorker> {
  using Clock = std::chrono::steady_clock;

 public:
  struct Job {
    int64_t duration_ns = 0;
    std::function<void()> transfer;
    // Called on the worker's thread at the end of the job, with its error or null. Must not throw.
    // Called exactly once for every submitted job.
    std::function<void(std::exception_ptr)> finish;
    Clock::time_point submitted = {}; // set by submit()
  };

  // Thread-safe. Throws c10::Error after stop().
  void submit(Job job);

  // Finishes all jobs with an error at once, including the current one, and joins the thread. If a
  // finish callback calls it, the thread ends by itself. Repeated calls are allowed. The caller
  // must hold no lock that a finish callback needs.
  void stop();

 private:
  void run();
  void carry_out(Job job);
  // Returns false if stopped before the deadline.
  bool wait_until(Clock::time_point deadline);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> queue_;
  bool stopping_ = false;
  std::thread thread_;
  // Only the thread uses these.
  Clock::time_point free_at_;
  Clock::duration lateness_ = Clock::duration::zero(); // lateness of its wake-ups
};

// A collective on the link.
struct Transfer {
  c10d::OpType op = c10d::OpType::UNKNOWN;
  bool async = true;
  std::vector<at::Tensor> outputs;
  std::vector<Move> moves;
  double ns = 0.0; // time on the link, without the latency
};

class EmulatedLink {
 public:
  using WorkPtr = c10::intrusive_ptr<EmulatedWork>;

  // The works get `rank` and `timeout`; the model must be valid.
  EmulatedLink(int rank, const LinkModel& model, std::chrono::milliseconds timeout)
      : rank_(rank), model_(model), timeout_(timeout) {}

  // Adds a communicator of the same ranks and returns its number. Number 0 always exists.
  int add_communicator();
  LinkModel model() const;
  // Sets the link model of later collectives.
  void set_model(const LinkModel& model);
  WorkPtr carry(Transfer transfer, int communicator);
  // Fails running collectives and joins the thread; later collectives on the CPU throw.
  void stop() {
    worker_->stop();
  }

 private:
  struct Communicator {
    c10::Stream stream; // for asyncOp = true
    c10::Stream last_stream; // the stream of its last collective
    std::shared_ptr<c10::Event> last = nullptr; // recorded after its last collective
  };
  // The memory of a device's link, which the device's first collective makes.
  struct DeviceLink {
    ~DeviceLink();

    c10::Device device;
    c10::Stream home; // the stream of the clock's allocation
    at::Tensor clock; // when the link is free, then a ring of deadlines; int64, nanoseconds
    int64_t next_deadline = 0;
    std::vector<Communicator> communicators = {};
  };

  void carry_on_cpu(const WorkPtr& work, Transfer transfer, int64_t ns);
  void carry_on_device(
      const WorkPtr& work,
      Transfer transfer,
      int64_t ns,
      DeviceLink& link,
      Communicator& communicator);
  DeviceLink& device_link(c10::Device device);
  static Communicator& find(DeviceLink& link, int communicator);

  mutable std::mutex mutex_;
  const int rank_;
  int num_communicators_ = 1;
  LinkModel model_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<LinkWorker> worker_ = std::make_shared<LinkWorker>();
  std::vector<std::unique_ptr<DeviceLink>> device_links_;
};

} // namespace zerocore
