// A c10d backend of the device that orders collectives as NCCL does; bytes travel over gloo.
//
// A collective is a task of the current stream. If it is asynchronous, it is a task of the
// communicator's own stream, after the current one. Collectives of a communicator run in the order
// in which the host issued them, whatever their streams. Without asyncOp there is no Work to wait
// for; with it the Work keeps the tensors until wait(). Coalesced collectives are one task, which
// is issued at the end.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "queue.h"

namespace async_device {

// A task of one or more collectives: the number of their communicator, their names, and whether all
// their tensors are registered with it.
struct Launch {
  int communicator;
  std::string what;
  bool is_registered;
};

// Begins to note launches when they are issued and when they are over.
void begin_launches();
std::vector<Launch> issued_launches();
std::vector<Launch> finished_launches();

class AsyncGroup final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // `wire` carries tensors of the CPU between the same ranks.
  explicit AsyncGroup(c10::intrusive_ptr<c10d::Backend> wire);

  const std::string getBackendName() const override {
    return "asyncdev";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override {
    return true;
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override; // NOLINT(*-runtime-int)
  // Calls between these two return null; endCoalescing() returns their common Work, if they are
  // asynchronous.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPtr allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&)
      override;
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&)
      override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors&, Tensors&, const c10d::ReduceScatterOptions&)
      override;
  WorkPtr alltoall_base(
      at::Tensor&,
      at::Tensor&,
      std::vector<int64_t>&,
      std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;

 private:
  struct Collective {
    c10d::OpType op;
    std::string what;
    bool async;
    Tensors tensors; // the written ones, then the read ones
    std::vector<Task> tasks;
  };

  WorkPtr issue(c10d::OpType op, bool async, Tensors tensors, Task task);
  WorkPtr launch(Collective collective);
  WorkPtr in_one_launch(const std::function<void()>& calls);
  WorkPtr work(c10d::OpType op, int stream, const PointPtr& done, Tensors tensors) const;

  c10::intrusive_ptr<c10d::Backend> wire_;
  const int stream_;
  const int number_;
  std::mutex mutex_;
  PointPtr last_; // the end of the communicator's last task
  std::optional<Collective> coalesced_; // between startCoalescing() and endCoalescing()
};

} // namespace async_device
