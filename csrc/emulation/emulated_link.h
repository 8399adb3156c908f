// The emulated link itself: carries out collectives, each in the time that a link would take.
//
// Note [Time on the link]
// A collective lasts as long as runtime/link_model says, its real memory traffic included.
// On the CPU they go one after the other in the order of issue, on one thread that mostly sleeps.
// On a device kernels book the link and wait, on the current stream (asyncOp = false) or a stream
// of the communicator's own. Those of a communicator go in the order of issue, as NCCL's do,
// whichever stream is late. Two communicators of the same ranks share the link: whose stream gets
// to it first has it first.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "emulation/emulated_work.h"
#include "emulation/link_model.h"
#include "emulation/link_worker.h"

namespace zerocore {

// A collective as the link carries it.
struct Transfer {
  c10d::OpType op = c10d::OpType::UNKNOWN;
  bool async = true;
  std::vector<at::Tensor> outputs;
  std::vector<Move> moves;
  double ns = 0.0; // on the link, without the latency
};

class EmulatedLink {
 public:
  using WorkPtr = c10::intrusive_ptr<EmulatedWork>;

  // `rank` and `timeout` are those of the works; the model is valid.
  EmulatedLink(int rank, const LinkModel& model, std::chrono::milliseconds timeout)
      : rank_(rank), model_(model), timeout_(timeout) {}

  // Another communicator of the same ranks: its number. There is number 0 from the beginning.
  int add_communicator();
  LinkModel model() const;
  // For collectives issued from now on.
  void set_model(const LinkModel& model);
  WorkPtr carry(Transfer transfer, int communicator);
  // Fails what is under way and joins the thread; later collectives on the CPU throw.
  void stop() {
    worker_->stop();
  }

 private:
  struct Communicator {
    c10::Stream stream; // for asyncOp = true
    c10::Stream last_stream; // of its last collective
    std::shared_ptr<c10::Event> last = nullptr; // behind that
  };
  // The memory of a device's link; made by the first collective there.
  struct DeviceLink {
    ~DeviceLink();

    c10::Device device;
    c10::Stream home; // that the clock's memory was allocated on
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
