// The emulated link itself: carries out collectives, each in the time that a link would take.
//
// Note [Time on the link]
// A collective lasts as long as runtime/link_model says, its real memory traffic included.
// Collectives of a group share the link and go one after the other. On the CPU in the order of
// issue, on one thread that mostly sleeps; on a device in the order in which the streams get to
// them: kernels book the link and wait, on the current stream (asyncOp = false) or a stream of
// the group's own.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "runtime/emulated_work.h"
#include "runtime/link_model.h"
#include "runtime/link_worker.h"

namespace zerocore {

// A collective as the link carries it.
struct Transfer {
  c10d::OpType op = c10d::OpType::UNKNOWN;
  bool async = true;
  std::vector<at::Tensor> outputs;
  std::vector<Move> moves;
  double ns = 0.0; // on the link, without the latency
  std::shared_future<void> after = {}; // on the CPU: begins behind it; not valid for at once
};

class EmulatedLink {
 public:
  using WorkPtr = c10::intrusive_ptr<EmulatedWork>;

  // `rank` and `timeout` are those of the works. Throws ValueError for a model that makes no sense.
  EmulatedLink(int rank, const LinkModel& model, std::chrono::milliseconds timeout);

  LinkModel model() const;
  // For collectives issued from now on. Throws ValueError.
  void set_model(const LinkModel& model);
  WorkPtr carry(Transfer transfer);
  // Fails what is under way and joins the thread; later collectives on the CPU throw.
  void stop() {
    worker_->stop();
  }

 private:
  // The memory and the stream of a device's link; made by the first collective there.
  struct DeviceLink {
    ~DeviceLink();

    c10::Device device;
    c10::Stream stream; // for asyncOp = true
    c10::Stream home; // that the clock's memory was allocated on
    at::Tensor clock; // when the link is free, then a ring of deadlines; int64, nanoseconds
    int64_t next_deadline = 0;
    std::unordered_map<c10::Stream, std::shared_ptr<c10::Event>> last = {}; // collective, by stream
  };

  void carry_on_cpu(const WorkPtr& work, Transfer transfer, int64_t ns);
  void carry_on_device(const WorkPtr& work, Transfer transfer, int64_t ns, c10::Device device);
  DeviceLink& device_link(c10::Device device);

  mutable std::mutex mutex_;
  const int rank_;
  LinkModel model_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<LinkWorker> worker_ = std::make_shared<LinkWorker>();
  std::vector<std::unique_ptr<DeviceLink>> device_links_;
};

} // namespace zerocore
