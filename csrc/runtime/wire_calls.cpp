// Calls of a c10d backend.
#include "runtime/wire_calls.h"

#include <c10/util/Exception.h>

#include <exception>

namespace zerocore::wire {

namespace {

Works all_gather(c10d::Backend& backend, at::Tensor full, at::Tensor own, bool async) {
  c10d::AllgatherOptions options;
  options.asyncOp = async;
  return {backend._allgather_base(full, own, options)};
}

Works broadcast_slices(c10d::Backend& backend, const at::Tensor& full, const at::Tensor& own) {
  const int64_t numel = own.numel();
  const at::Tensor slice = full.narrow(0, backend.getRank() * numel, numel);
  if (slice.data_ptr() != own.data_ptr()) {
    slice.copy_(own);
  }
  Works works;
  for (int64_t root = 0; root < backend.getSize(); ++root) {
    std::vector<at::Tensor> tensors = {full.narrow(0, root * numel, numel)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    works.push_back(backend.broadcast(tensors, options));
  }
  return works;
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
      return broadcast_slices(backend, full, own);
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
