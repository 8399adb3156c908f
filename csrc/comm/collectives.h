// All-gather, reduce-scatter, all-reduce and all-to-all of flat buckets over a c10d process group.
//
// Every call returns at once with a PendingCollective that keeps its tensors alive. On a device a
// collective runs on its role's stream. The caller orders that stream after the writers of the
// tensors: if this class did so, a gather would wait for the layer that it should overlap. wait()
// orders the compute stream after the collective; on the CPU it blocks the host.
//
// Collectives calls the backend directly, not through the dispatcher, to save 5 us of host time a
// call.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <vector>

#include "comm/pending_collective.h"
#include "plan/wire_methods.h"

namespace zerocore {

// Tensors are 1-D: bytes, or floating-point numbers for sums.
struct CollectiveCall {
  at::Tensor to, from;
  CollectiveTag tag;
};

// Bytes of an all-to-all's messages, by rank.
struct MessageSizes {
  std::vector<int64_t> sent, received;
  int64_t total_nbytes = 0; // bytes of all ranks' messages; equal on all ranks
};

class Collectives {
 public:
  // `alarm` may be null; otherwise it must outlive the object. `reductions`: a second communicator
  // of the same ranks, for reductions, GatherSums and all-to-alls; null to use `group` for all of
  // them. They run on the stream of `reducing`. `sums_in_order`: see WireMethods.
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
  // Returns the wire methods of gathers and reduce-scatters.
  const WireMethods& methods() const {
    return methods_;
  }
  // Returns the communicator of gathers.
  const c10::intrusive_ptr<c10d::Backend>& backend() const {
    return backend_;
  }
  // Returns the stream role of reductions.
  StreamRole reducing() const {
    return reducing_;
  }

  // Issues a gather or a reduction. When it is done, `call.to` holds:
  //   AllGather      every rank's `from`, rank after rank; `from` may be this rank's slice of `to`
  //   GatherSums     the same, in place, on the communicator of reductions
  //   ReduceScatter  methods().reduce.parts() values per element, each part as large as this rank's
  //                  slice. A single part is the sum, and may be this rank's slice of `from`. An
  //                  exchange writes each rank's part, rank after rank, for the caller to add
  //   AllReduce      the sum of `to`, in place
  PendingCollective start(TraceOp op, const CollectiveCall& call);
  // Returns whether start_together() makes one launch of several calls of one kind.
  bool launches_together() const {
    return launches_together_;
  }
  // Starts all calls in one launch, with one event after all of them.
  std::vector<PendingCollective> start_together(
      TraceOp op,
      const std::vector<CollectiveCall>& calls);
  // Sends each rank its part of `from`, and receives this rank's part from each rank into `to`.
  // Both are bytes, rank after rank.
  PendingCollective all_to_all(CollectiveCall call, MessageSizes sizes);
  // Sends rank 0's bytes to all ranks, in place.
  PendingCollective broadcast(const at::Tensor& bytes, const CollectiveTag& tag);

  IssueWatch& watch() {
    return watch_;
  }

 private:
  PendingCollective begin(TraceOp op, const CollectiveCall& call);
  Works issue(TraceOp op, const CollectiveCall& call, bool async) const;
  StreamRole role_of(TraceOp op) const {
    return op == TraceOp::AllGather ? StreamRole::AllGather : reducing_;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::intrusive_ptr<c10d::Backend> backend_, reductions_;
  const Streams& streams_;
  const StreamRole reducing_;
  const bool launches_together_;
  WireMethods methods_;
  IssueWatch watch_; // has a guard for gloo only
};

} // namespace zerocore
