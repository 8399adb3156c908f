// All-gather, reduce-scatter, all-reduce and all-to-all of flat buckets over a c10d process group.
//
// Every call returns at once with a PendingCollective that keeps its tensors alive. On a device
// with streams a collective runs on its role's stream: the caller orders that stream behind what
// wrote the tensors (nothing does so here: a gather would wait for the layer it should overlap
// with), and wait() orders the compute stream behind the collective. On the CPU wait() blocks the
// host.
//
// The backend is called directly, not through the dispatcher: 5 us less of host time a call.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <vector>

#include "comm/pending_collective.h"
#include "plan/wire_methods.h"

namespace zerocore {

// Tensors are 1-D: bytes, or floating-point numbers where they are summed.
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

  // Issues a gather or a reduction of `call.to`, over the ranks:
  //   AllGather      every rank's `from`, rank after rank; `from` may be this rank's slice of `to`,
  //                  in place, or other memory
  //   GatherSums     the same among reductions, in place
  //   ReduceScatter  what methods().reduce says of this rank's slice of the sum of `from`: as many
  //                  parts of the slice's size. One part is the sum itself, and may be the slice of
  //                  `from`; of an exchange they are what came from each rank, rank after rank
  //   AllReduce      the sum of `to`, in place
  PendingCollective start(TraceOp op, const CollectiveCall& call);
  // Several calls of one kind cost one launch if start_together() starts them.
  bool launches_together() const {
    return launches_together_;
  }
  // As start() of each, with one event behind all.
  std::vector<PendingCollective> start_together(
      TraceOp op,
      const std::vector<CollectiveCall>& calls);
  // Sends each rank its part of `from`; what the ranks sent to this one comes into `to`. Both are
  // bytes, rank after rank.
  PendingCollective all_to_all(CollectiveCall call, MessageSizes sizes);
  // Rank 0's bytes to all ranks, in place.
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
  IssueWatch watch_; // without a guard where there is no need or no way
};

} // namespace zerocore
