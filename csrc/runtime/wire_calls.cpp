// Calls of a c10d backend.
#include "runtime/wire_calls.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <string>

#include "common/math.h"

namespace zerocore::wire {

namespace {

Works all_gather(c10d::Backend& backend, at::Tensor full, at::Tensor own, bool async) {
  c10d::AllgatherOptions options;
  options.asyncOp = async;
  return {backend._allgather_base(full, own, options)};
}

// One slice from each rank, in pieces of `most` elements.
Works broadcast_slices(
    c10d::Backend& backend,
    const std::vector<at::Tensor>& slices,
    int64_t most) {
  const int64_t numel = slices.front().numel();
  Works works;
  int64_t begin = 0;
  do { // also if the slices are empty
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
// Gloo sends when the receiver has asked, and a rank's request waits behind the data that it sends
// itself: broadcasts of two ranks, and their all-to-all, use a link in one direction at a time. A
// piece of 1 MiB leaves at once for the socket's buffer, so by turns of pieces both directions are
// busy: at 1 Gbit/s a step of stage 3 takes 0.63 instead of 1.03 of FSDP2's
// (benchmarks/network.py). Over loopback pieces only cost turns of gloo's threads: 1.07 of a step
// without. With more ranks the links are busy both ways anyway.
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

// Of two ranks.
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

// Equal in processes that share a loopback device.
int64_t loopback_number() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat of_namespace = {};
  ::stat("/proc/self/ns/net", &of_namespace);
  return static_cast<int64_t>(
      mix(std::hash<std::string>()(boot), static_cast<uint64_t>(of_namespace.st_ino)));
}

} // namespace

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

} // namespace zerocore::wire
