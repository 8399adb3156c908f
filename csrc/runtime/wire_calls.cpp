// Calls of a c10d backend.
#include "runtime/wire_calls.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace zerocore::wire {

namespace {

Works all_gather(c10d::Backend& backend, at::Tensor full, at::Tensor own, bool async) {
  c10d::AllgatherOptions options;
  options.asyncOp = async;
  return {backend._allgather_base(full, own, options)};
}

// One slice from each rank.
//
// Note [Pieces]
// A broadcast uses the wire in one direction, and gloo's all-to-all of two ranks hardly both ones.
// Where two ranks send their slices by turns in pieces of 1 MiB, a piece of each is under way: at 1
// Gbit/s a step of stage 3 takes 0.63 instead of 1.01 of FSDP2's. With more ranks the links are
// busy both ways, and pieces only cost turns of gloo's threads.
Works broadcast_slices(c10d::Backend& backend, const std::vector<at::Tensor>& slices) {
  constexpr int64_t kPieceNbytes = 1024 * 1024;
  const int64_t numel = slices.front().numel();
  const int64_t most = slices.size() == 2 ? kPieceNbytes / slices.front().itemsize() : numel;
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

Works gather_slices(c10d::Backend& backend, const at::Tensor& full, const at::Tensor& own) {
  const std::vector<at::Tensor> slices = full.chunk(backend.getSize());
  const at::Tensor& slice = slices[backend.getRank()];
  if (slice.data_ptr() != own.data_ptr()) {
    slice.copy_(own);
  }
  return broadcast_slices(backend, slices);
}

// Of two ranks.
Works swap_halves(c10d::Backend& backend, const at::Tensor& received, const at::Tensor& sent) {
  const int own = backend.getRank();
  std::vector<at::Tensor> slices = received.chunk(2);
  const std::vector<at::Tensor> halves = sent.chunk(2);
  slices[own].copy_(halves[own]);
  slices[own] = halves[1 - own];
  return broadcast_slices(backend, slices);
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
      return gather_slices(backend, full, own);
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
    case ReduceMethod::Kind::Swap:
      return swap_halves(backend, received, full);
  }
  TORCH_INTERNAL_ASSERT(false);
}

} // namespace zerocore::wire
