// Calls of a c10d backend.
#include "runtime/wire_calls.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>

namespace zerocore::wire {

namespace {

Works all_gather(c10d::Backend& backend, at::Tensor full, at::Tensor own, bool async) {
  c10d::AllgatherOptions options;
  options.asyncOp = async;
  return {backend._allgather_base(full, own, options)};
}

// One slice from each rank, in pieces of so many bytes; 0 for whole ones.
Works broadcast_slices(
    c10d::Backend& backend,
    const std::vector<at::Tensor>& slices,
    int64_t piece_nbytes) {
  const int64_t numel = slices.front().numel();
  const int64_t most =
      piece_nbytes == 0 ? std::max<int64_t>(numel, 1) : piece_nbytes / slices.front().itemsize();
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

Works gather_slices(
    c10d::Backend& backend,
    const at::Tensor& full,
    const at::Tensor& own,
    int64_t piece_nbytes) {
  const std::vector<at::Tensor> slices = full.chunk(backend.getSize());
  const at::Tensor& slice = slices[backend.getRank()];
  if (slice.data_ptr() != own.data_ptr()) {
    slice.copy_(own);
  }
  return broadcast_slices(backend, slices, piece_nbytes);
}

// Of two ranks.
Works swap_halves(
    c10d::Backend& backend,
    const at::Tensor& received,
    const at::Tensor& sent,
    int64_t piece_nbytes) {
  const int own = backend.getRank();
  std::vector<at::Tensor> slices = received.chunk(2);
  const std::vector<at::Tensor> halves = sent.chunk(2);
  slices[own].copy_(halves[own]);
  slices[own] = halves[1 - own];
  return broadcast_slices(backend, slices, piece_nbytes);
}

Works all_to_all(c10d::Backend& backend, at::Tensor received, at::Tensor sent, bool async) {
  std::vector<int64_t> even;
  c10d::AllToAllOptions options;
  options.asyncOp = async;
  return {backend.alltoall_base(received, sent, even, even, options)};
}

} // namespace

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
      return gather_slices(backend, full, own, method.piece_nbytes);
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
      if (method.piece_nbytes > 0) {
        return swap_halves(backend, received, full, method.piece_nbytes);
      }
      return all_to_all(backend, received, full, async);
  }
  TORCH_INTERNAL_ASSERT(false);
}

JointLaunch::JointLaunch(c10d::Backend& backend) : backend_(backend) {
  backend_.startCoalescing();
}

JointLaunch::~JointLaunch() {
  if (open_) {
    try {
      backend_.endCoalescing();
    } catch (const std::exception&) { // what was thrown first tells more
    }
  }
}

c10::intrusive_ptr<c10d::Work> JointLaunch::end() {
  open_ = false;
  return backend_.endCoalescing();
}

} // namespace zerocore::wire
