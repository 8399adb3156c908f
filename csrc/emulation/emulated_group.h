// The emulated link: a c10d backend for one process that plays one rank of N.
//
// Note [Mirrors]
// The peers mirror this rank: whatever they send equals what this rank sends. So a
// gather fills every slice with this rank's data; a reduction of N equal values is N times the
// value (sum), the value (average, minimum, maximum, bitwise and, or), N * factor times it (premul
// sum); a reduce-scatter is that of this rank's slice; a broadcast changes nothing, whoever is the
// root; an all-to-all receives from every peer what this rank sends to itself. A training step is
// therefore that of a single process whose batch every rank sees. Send and receive do not exist:
// a mirror of rank 0 never sends what rank 0 expects from rank 1.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "emulation/emulated_link.h"
#include "emulation/mirrored_call.h"

namespace zerocore {

class EmulatedGroup final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  // Calls a function that blocks without the locks that finish callbacks may need (Python's).
  using Unlocked = std::function<void(const std::function<void()>&)>;

  EmulatedGroup(
      int rank,
      int size,
      const LinkModel& link,
      std::chrono::milliseconds timeout,
      Unlocked unlocked);
  // One more communicator of a link.
  EmulatedGroup(
      int rank,
      int size,
      std::shared_ptr<EmulatedLink> link,
      int communicator,
      Unlocked unlocked)
      : Backend(rank, size),
        link_(std::move(link)),
        communicator_(communicator),
        unlocked_(std::move(unlocked)) {}
  ~EmulatedGroup() override;

  // Another communicator of the same ranks, over the same link, see Note [Time on the link]. The
  // link ends with the group that it was made for.
  c10::intrusive_ptr<EmulatedGroup> beside() const;

  LinkModel link() const {
    return link_->model();
  }
  // For collectives issued from now on.
  void set_link(const LinkModel& link) {
    link_->set_model(link);
  }

  const std::string getBackendName() const override {
    return "emulated";
  }
  // Fails what is under way and joins the thread; later collectives on the CPU throw.
  void shutdown() override;
  void abort() override {
    shutdown();
  }

  WorkPtr allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override;
  WorkPtr reduce_scatter(Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&)
      override;
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&)
      override;
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  WorkPtr alltoall_base(
      at::Tensor&,
      at::Tensor&,
      std::vector<int64_t>&,
      std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override;
  WorkPtr alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;

  // The calls in between become one collective that pays the latency once. They return null,
  // endCoalescing() returns the work of all.
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
  }

 private:
  WorkPtr issue(MirroredCall call);

  const std::shared_ptr<EmulatedLink> link_;
  const int communicator_;
  const Unlocked unlocked_;
  std::mutex mutex_;
  std::optional<Transfer> coalesced_; // between startCoalescing() and endCoalescing()
  std::atomic<uint64_t> sequence_ = 0;
};

} // namespace zerocore
