// The emulated group: a c10d backend for one process that acts as one rank of N.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "emulation/emulated_link.h"
#include "emulation/emulated_work.h"

namespace zerocore {

// Builds a collective of the emulated group: its moves, with peers that mirror this rank, and the
// bytes that cross the link.
class MirroredCall {
 public:
  MirroredCall(
      const c10d::Backend& group,
      c10d::OpType op,
      Traffic traffic,
      bool async,
      int64_t nbytes = 0,
      std::vector<at::Tensor> outputs = {});

  // Returns how a reduction combines the ranks' equal values.
  Combination combination(const c10d::ReduceOp& op) const;
  // Adds one move. Throws ValueError if the tensors do not match.
  void add(const at::Tensor& to, const at::Tensor& from, Combination how);
  // Adds moves of `own` to every rank's slice of `full`; `own` may be this rank's slice.
  void gather(const at::Tensor& full, const at::Tensor& own);
  // Adds the move that makes `shard` this rank's slice of the reduced `full`.
  void reduce(const at::Tensor& shard, const at::Tensor& full, const c10d::ReduceOp& op);

  Traffic traffic;
  int64_t nbytes;
  Transfer transfer; // its time follows from `traffic` and `nbytes`

 private:
  // Throws unless `full` has a slice for each rank.
  void check_slices(const char* what, const at::Tensor& full, const at::Tensor& slice) const;

  int rank_, size_;
};

// Note [Mirrors]
// The peers mirror this rank: each sends the same data as this rank. So a gather fills every slice
// with this rank's data. A reduction of N equal values is N times the value (sum), the value
// (average, minimum, maximum, bitwise and, or), or N * factor times it (premul sum). A
// reduce-scatter does the same to this rank's slice. A broadcast changes nothing, from any root. An
// all-to-all receives from every peer what this rank sends to itself. So a training step equals the
// step of a single process whose batch every rank sees. Send and receive are not supported: a
// mirror of rank 0 never sends what rank 0 expects from rank 1.
class EmulatedGroup final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  // Calls a blocking function without the locks that finish callbacks may need (Python's GIL).
  using Unlocked = std::function<void(const std::function<void()>&)>;

  EmulatedGroup(
      int rank,
      int size,
      const LinkModel& link,
      std::chrono::milliseconds timeout,
      Unlocked unlocked);
  // Makes another communicator of a link.
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

  // Returns another communicator of the same ranks over the same link, see Note [Time on the link].
  // The link ends with its first group.
  c10::intrusive_ptr<EmulatedGroup> beside() const;

  LinkModel link() const {
    return link_->model();
  }
  // Sets the link model of later collectives.
  void set_link(const LinkModel& link) {
    link_->set_model(link);
  }

  const std::string getBackendName() const override {
    return "emulated";
  }
  // Fails running collectives and joins the thread; later collectives on the CPU throw.
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

  // Calls between startCoalescing() and endCoalescing() become one collective with one latency.
  // They return null; endCoalescing() returns the common work.
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
