// Issues the c10d calls that the group's wire methods ask for.
#include "comm/collectives.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>
#include <sys/stat.h>

#include <algorithm>
#include <exception>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "common/math.h"
#include "watch/control_link.h"

namespace zerocore {

// -- calls of a backend ---------------------------------------------------------------------
//
// `async`: c10d's asyncOp; without it a device runs the collective on the current stream.

namespace {

Works all_gather(c10d::Backend& backend, at::Tensor full, at::Tensor own, bool async) {
  c10d::AllgatherOptions options;
  options.asyncOp = async;
  return {backend._allgather_base(full, own, options)};
}

// Broadcasts one slice from each rank, in pieces of at most `most` elements.
Works broadcast_slices(
    c10d::Backend& backend,
    const std::vector<at::Tensor>& slices,
    int64_t most) {
  const int64_t numel = slices.front().numel();
  Works works;
  int64_t begin = 0;
  do { // at least once, even if the slices are empty
    const int64_t length = std::min(most, numel - begin);
    for (size_t root = 0; root < slices.size(); ++root) {
      std::vector<at::Tensor> tensors = {slices[root].narrow(0, begin, length)};
      c10d::BroadcastOptions options;
      options.rootRank = static_cast<int64_t>(root);
      works.push_back(backend.broadcast(tensors, options));
    }
    begin += length;
  } while (begin < numel);
  return works;
}

// Note [Pieces]
// A gloo rank sends when the receiver has asked, and its request waits for the data that it sends
// itself. So broadcasts and all-to-alls of two ranks use a link in one direction at a time. A piece
// of 1 MiB fits into the socket's buffer, so pieces in turn use both directions. At 1 Gbit/s a step
// of stage 3 then takes 0.63 of FSDP2's time, without pieces 1.03 (benchmarks/network.py). Over
// loopback pieces only add turns of gloo's threads: a step takes 1.07 of the time without. More
// than two ranks use both directions anyway.
int64_t piece_numel(const at::Tensor& tensor) {
  return 1024 * 1024 / static_cast<int64_t>(tensor.itemsize());
}

Works gather_slices(
    c10d::Backend& backend,
    const at::Tensor& full,
    const at::Tensor& own,
    int64_t most) {
  const std::vector<at::Tensor> slices = full.chunk(backend.getSize());
  const at::Tensor& slice = slices[backend.getRank()];
  if (slice.data_ptr() != own.data_ptr()) {
    slice.copy_(own);
  }
  return broadcast_slices(backend, slices, most);
}

// Exchanges halves between two ranks, in pieces.
Works swap_halves(c10d::Backend& backend, const at::Tensor& received, const at::Tensor& sent) {
  const int own = backend.getRank();
  std::vector<at::Tensor> slices = received.chunk(2);
  const std::vector<at::Tensor> halves = sent.chunk(2);
  slices[own].copy_(halves[own]);
  slices[own] = halves[1 - own];
  return broadcast_slices(backend, slices, piece_numel(sent));
}

Works all_to_all(c10d::Backend& backend, at::Tensor received, at::Tensor sent, bool async) {
  std::vector<int64_t> even;
  c10d::AllToAllOptions options;
  options.asyncOp = async;
  return {backend.alltoall_base(received, sent, even, even, options)};
}

// Returns a number that is equal exactly in processes with the same loopback device.
int64_t loopback_number() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat of_namespace = {};
  ::stat("/proc/self/ns/net", &of_namespace);
  return static_cast<int64_t>(
      mix(std::hash<std::string>()(boot), static_cast<uint64_t>(of_namespace.st_ino)));
}

// Returns whether the ranks reach each other without a network. Collective; gloo only.
bool share_loopback(c10d::Backend& backend) {
  at::Tensor own = at::full({1}, loopback_number(), at::kLong);
  at::Tensor all = at::empty({backend.getSize()}, own.options());
  all_gather(backend, all, own, true).front()->wait();
  return all.eq(own).all().item<bool>();
}

Works gather(
    c10d::Backend& backend,
    const GatherMethod& method,
    const at::Tensor& full,
    const at::Tensor& own,
    bool async) {
  switch (method.kind_of(static_cast<int64_t>(full.nbytes()))) {
    case GatherMethod::Kind::AllGather:
      return all_gather(backend, full, own, async);
    case GatherMethod::Kind::Broadcasts:
      return gather_slices(backend, full, own, std::max<int64_t>(own.numel(), 1));
    case GatherMethod::Kind::Pieces:
      return gather_slices(backend, full, own, piece_numel(own));
    case GatherMethod::Kind::Copies:
      return all_to_all(backend, full, own.repeat({backend.getSize()}), async);
  }
  TORCH_INTERNAL_ASSERT(false);
}

Works all_reduce(c10d::Backend& backend, const at::Tensor& tensor, bool async) {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::SUM;
  options.asyncOp = async;
  return {backend.allreduce(tensors, options)};
}

Works reduce(
    c10d::Backend& backend,
    const ReduceMethod& method,
    at::Tensor received,
    at::Tensor full,
    bool async) {
  switch (method.kind) {
    case ReduceMethod::Kind::ReduceScatter: {
      c10d::ReduceScatterOptions options;
      options.asyncOp = async;
      return {backend._reduce_scatter_base(received, full, options)};
    }
    case ReduceMethod::Kind::Exchange:
      return all_to_all(backend, received, full, async);
    case ReduceMethod::Kind::Pieces:
      return swap_halves(backend, received, full);
  }
  TORCH_INTERNAL_ASSERT(false);
}

// Writes the sum to the first part of `received`, and zeros to the others.
c10::intrusive_ptr<c10d::Work> reduce_by(
    const OwnCollective& reduce,
    const at::Tensor& received,
    const at::Tensor& full,
    int64_t num_ranks) {
  const int64_t numel = full.numel() / num_ranks;
  if (received.numel() > numel) {
    received.narrow(0, numel, received.numel() - numel).zero_();
  }
  return reduce(received.narrow(0, 0, numel), full);
}

// Makes one launch of the collectives that `issue` starts. Ends the launch even on an error:
// otherwise the backend would coalesce for ever. Throws the backend's error if it cannot coalesce
// (Backend::supportsCoalescing).
template <typename Issue>
Works launch_together(c10d::Backend& backend, const Issue& issue) {
  backend.startCoalescing();
  try {
    issue();
  } catch (...) {
    try {
      backend.endCoalescing();
    } catch (const std::exception&) { // the first error says more
    }
    throw;
  }
  return {backend.endCoalescing()};
}

// Views complex numbers as pairs of real ones, which backends support.
at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_complex() ? at::view_as_real(tensor).view(-1) : tensor;
}

// Returns gloo's guard, or null for other backends, see Note [Known sequences].
std::shared_ptr<IssueGuard> guard_of(const c10::intrusive_ptr<c10d::Backend>& backend) {
  if (backend->getBackendName() != "gloo") {
    return nullptr;
  }
  const auto link = ControlLink::of(backend);
  return {link, &link->guard()};
}

} // namespace

// -- collectives of a group -----------------------------------------------------------------

Collectives::Collectives(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    const Streams& streams,
    Alarm* alarm,
    const c10::intrusive_ptr<c10d::ProcessGroup>& reductions,
    bool sums_in_order,
    StreamRole reducing)
    : group_(std::move(group)),
      backend_(group_->getBackend(streams.device().type())),
      reductions_(reductions ? reductions->getBackend(streams.device().type()) : backend_),
      streams_(streams),
      reducing_(reducing),
      launches_together_(streams.has_streams() && backend_->supportsCoalescing()),
      methods_(WireMethods::of_backend(backend_->getBackendName(), size(), sums_in_order)),
      watch_(alarm, *group_, guard_of(backend_)) {
  if (backend_->getBackendName() == "gloo" && size() == 2 && !share_loopback(*backend_)) {
    methods_.send_pieces();
  }
}

Works Collectives::issue(TraceOp op, const CollectiveCall& complex, bool async) const {
  const CollectiveCall call = {as_real(complex.to), as_real(complex.from), complex.tag};
  const OwnCollective* own = call.tag.own;
  switch (op) {
    case TraceOp::GatherSums:
      return gather(*reductions_, methods_.gather, call.to, call.from, async);
    case TraceOp::ReduceScatter:
      return own != nullptr ? Works{reduce_by(*own, call.to, call.from, size())}
                            : reduce(*reductions_, methods_.reduce, call.to, call.from, async);
    case TraceOp::AllReduce:
      return all_reduce(*reductions_, call.to, async);
    default:
      return own != nullptr ? Works{(*own)(call.to, call.from)}
                            : gather(*backend_, methods_.gather, call.to, call.from, async);
  }
}

// GatherSums and AllReduce run in place, so they read no other tensor.
PendingCollective Collectives::begin(TraceOp op, const CollectiveCall& call) {
  const bool is_in_place = op == TraceOp::GatherSums || op == TraceOp::AllReduce;
  const at::Tensor from = is_in_place ? at::Tensor() : call.from;
  return {watch_, streams_, role_of(op), trace_op_name(op), call.tag, call.to, from};
}

PendingCollective Collectives::start(TraceOp op, const CollectiveCall& call) {
  PendingCollective pending = begin(op, call);
  pending.issue(streams_, [&](bool async) { return issue(op, call, async); });
  return pending;
}

std::vector<PendingCollective> Collectives::start_together(
    TraceOp op,
    const std::vector<CollectiveCall>& calls) {
  std::vector<PendingCollective> pending;
  for (const CollectiveCall& call : calls) {
    pending.push_back(begin(op, call));
  }
  pending.back().issue(streams_, [&](bool async) {
    return launch_together(op == TraceOp::AllGather ? *backend_ : *reductions_, [&] {
      for (const CollectiveCall& call : calls) {
        issue(op, call, async);
      }
    });
  });
  for (PendingCollective& each : pending) {
    each.end_with(pending.back(), streams_);
  }
  return pending;
}

PendingCollective Collectives::all_to_all(CollectiveCall call, MessageSizes sizes) {
  call.tag.nbytes = sizes.total_nbytes;
  PendingCollective pending = begin(TraceOp::AllToAll, call);
  pending.issue(streams_, [&](bool async) {
    c10d::AllToAllOptions options;
    options.asyncOp = async;
    return Works{
        reductions_->alltoall_base(call.to, call.from, sizes.received, sizes.sent, options)};
  });
  return pending;
}

PendingCollective Collectives::broadcast(const at::Tensor& bytes, const CollectiveTag& tag) {
  PendingCollective pending(watch_, streams_, StreamRole::AllGather, "broadcast", tag, bytes, {});
  pending.issue(streams_, [&](bool async) {
    std::vector<at::Tensor> tensors = {bytes};
    c10d::BroadcastOptions options;
    options.asyncOp = async;
    return Works{backend_->broadcast(tensors, options)};
  });
  return pending;
}

} // namespace zerocore
