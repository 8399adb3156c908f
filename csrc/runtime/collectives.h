// All-gather, reduce-scatter, all-reduce and all-to-all of flat buckets over a c10d process group.
//
// Every call returns at once with a PendingCollective that keeps its tensors alive. On a device
// with streams a collective runs on its role's stream: the caller orders that stream behind what
// wrote the tensors (nothing does so here: a gather would wait for the layer it should overlap
// with), and wait() orders the compute stream behind the collective. On the CPU wait() blocks the
// host.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plan/wire_methods.h"
#include "runtime/stream.h"
#include "runtime/trace.h"

namespace zerocore {

class Alarm;
class IssueGuard;

// Raises the alarm, if there is one, and throws c10::DistBackendError with its sentence or with
// what failed.
[[noreturn]] void fail_collective(
    const char* op,
    const std::string& unit,
    const std::exception& error,
    Alarm* alarm);

class PendingCollective {
 public:
  PendingCollective() = default;
  PendingCollective(PendingCollective&&) = default;
  PendingCollective& operator=(PendingCollective&&) = default;

  // Orders later work of the compute stream behind the collective; on the CPU blocks until it is
  // done. Waiting again does nothing. Throws c10::DistBackendError that names the collective and
  // the unit when it failed (a peer died, a timeout, mismatched sizes).
  void wait(const Streams& streams);

 private:
  friend class Collectives;

  void wait_on_host() const;
  void wait_on_device(const Streams& streams) const;
  [[noreturn]] void fail(const char* op, const std::exception& error) const {
    fail_collective(op, *unit_, error, alarm_);
  }

  const char* op_ = nullptr;
  const std::string* unit_ = nullptr;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::vector<at::Tensor> keep_alive_;
  StreamEvent done_;
  std::shared_ptr<OpenRecord> record_;
  Alarm* alarm_ = nullptr; // of the model, if it has one
  int64_t number_ = -1; // in the alarm's ledger
};

// Waits for all of one role, the last one first: on a stream it is behind the others, so one wait
// is enough. Empties the list.
void wait_for_all(std::vector<PendingCollective>& collectives, const Streams& streams);

// A program's own collective, which takes the place of the backend's; may return null when it is
// done, or where it is the work of the current stream.
using OwnCollective =
    std::function<c10::intrusive_ptr<c10d::Work>(const at::Tensor& to, const at::Tensor& from)>;

// Names a collective in errors and in the trace; `unit` must outlive the collective.
struct CollectiveTag {
  const std::string* unit = nullptr;
  std::shared_ptr<OpenRecord> record; // null when not traced
  UnitId id = -1; // of the unit, -1 for several
  // Bytes that ranks compare, the same on all of them; by default those of the written tensors.
  std::optional<int64_t> nbytes = std::nullopt;
  const OwnCollective* own = nullptr; // null for the backend's, never empty; outlives the call
};

// A gather or a reduction that goes with others; of an all-reduce `from` is `to`.
struct CollectiveCall {
  at::Tensor to, from;
  CollectiveTag tag;
};

// Bytes of the messages of an all-to-all, by rank.
struct MessageSizes {
  std::vector<int64_t> sent, received;
  int64_t total_nbytes = 0; // of all ranks' messages: the same on all
};

class Collectives {
 public:
  // `alarm` may be null, and outlives the collectives otherwise. `reductions`: another communicator
  // of the same ranks, for all but gathers; null for the same one. These run on the stream of
  // `reducing`. `sums_in_order`: see WireMethods.
  Collectives(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      const Streams& streams,
      Alarm* alarm,
      const c10::intrusive_ptr<c10d::ProcessGroup>& reductions,
      bool sums_in_order,
      StreamRole reducing);

  int64_t rank() const {
    return group_->getRank();
  }
  int64_t size() const {
    return group_->getSize();
  }
  // How gathers and reduce-scatters go over the wire.
  const WireMethods& methods() const {
    return methods_;
  }
  // Of gathers.
  const c10::intrusive_ptr<c10d::Backend>& backend() const {
    return backend_;
  }
  // The role of reductions.
  StreamRole reducing() const {
    return reducing_;
  }

  // Several calls of one kind cost one launch if start_together() starts them.
  bool launches_together() const {
    return launches_together_;
  }
  // As all_gather, reduce_scatter or all_reduce of each, with one event behind all.
  std::vector<PendingCollective> start_together(TraceOp op, std::vector<CollectiveCall> calls);

  // Gathers every rank's `own` into `full`, rank after rank. `own` may be this rank's slice of
  // `full` (in place) or other memory. Both are 1-D bytes.
  PendingCollective all_gather(const at::Tensor& full, const at::Tensor& own, CollectiveTag tag);
  // The same among reductions, of floating-point numbers and in place.
  PendingCollective gather_sums(const at::Tensor& full, const at::Tensor& own, CollectiveTag tag);

  // Leaves in `received` what methods().reduce says of this rank's slice of the sum of `full` over
  // the ranks: as many parts of the slice's size. One part is the sum itself, and `received` may
  // be the slice of `full`; of an exchange they are what came from each rank, rank after rank. 1-D,
  // floating point.
  PendingCollective reduce_scatter(
      const at::Tensor& received,
      const at::Tensor& full,
      CollectiveTag tag);

  // Sums `tensor` (1-D) over the ranks in place.
  PendingCollective all_reduce(const at::Tensor& tensor, CollectiveTag tag);

  // Sends each rank its part of `sent`; what the ranks sent to this one comes into `received`. Both
  // are 1-D bytes, rank after rank.
  PendingCollective all_to_all(
      const at::Tensor& received,
      const at::Tensor& sent,
      MessageSizes sizes,
      CollectiveTag tag);

  // Rank 0's bytes to all ranks, in place.
  PendingCollective broadcast(const at::Tensor& bytes, CollectiveTag tag);

  // That of the group, shared with its other users; null if they need none.
  const IssueGuard* guard() const {
    return guard_.get();
  }

  // From here on ranks also compare `facts`, which must be the same on all of them.
  void set_facts(uint64_t facts) {
    facts_ = facts;
  }

 private:
  struct Operands {
    std::vector<at::Tensor> reads, writes;
  };

  // Runs `issue` on the role's stream and wraps what it returns.
  template <typename Issue>
  void issue_on(StreamRole role, PendingCollective& pending, const Issue& issue);
  template <typename Issue>
  PendingCollective start(
      const char* op,
      StreamRole role,
      Operands operands,
      CollectiveTag tag,
      const Issue& issue);
  PendingCollective begin(
      const char* op,
      StreamRole role,
      const Operands& operands,
      CollectiveTag tag);
  void finish(PendingCollective& pending, Operands operands, StreamRole role, StreamEvent done)
      const;
  void announce(PendingCollective& pending, UnitId id, int64_t nbytes);
  // Runs `block`, in which the host waits for other ranks, as a part of the collective.
  template <typename Block>
  void wait_in(const PendingCollective& pending, const Block& block) const;
  void trace_completion(const PendingCollective& pending) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::intrusive_ptr<c10d::Backend> backend_, reductions_;
  const Streams& streams_;
  const StreamRole reducing_;
  const bool launches_together_;
  WireMethods methods_;
  Alarm* alarm_ = nullptr;
  std::shared_ptr<IssueGuard> guard_; // null where there is no need or no way
  uint64_t user_ = 0;
  uint64_t facts_ = 0;
};

} // namespace zerocore
