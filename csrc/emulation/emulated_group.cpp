// The collectives of the emulated group: what each one moves and how many bytes cross the link.
#include "emulation/emulated_group.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace zerocore {

namespace {

using c10d::OpType;
using Kind = Combination::Kind;

int64_t nbytes_of(const std::vector<at::Tensor>& tensors) {
  return std::accumulate(
      tensors.begin(), tensors.end(), int64_t{0}, [](int64_t sum, const at::Tensor& tensor) {
        return sum + static_cast<int64_t>(tensor.nbytes());
      });
}

const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists) {
  TORCH_CHECK_VALUE(
      lists.size() == 1, "expected one list of tensors (one device a rank), got ", lists.size());
  return lists[0];
}

// Rows (of dimension 0) that go to or come from each rank; even ones if `splits` is empty.
std::vector<int64_t> rows(
    const at::Tensor& tensor,
    const std::vector<int64_t>& splits,
    int64_t world_size) {
  const int64_t total = tensor.dim() == 0 ? 0 : tensor.size(0);
  std::vector<int64_t> result = splits;
  if (splits.empty()) {
    result.assign(world_size, total / world_size);
  }
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(result.size()) == world_size &&
          std::accumulate(result.begin(), result.end(), int64_t{0}) == total,
      "all_to_all: ",
      total,
      " rows do not split over ",
      world_size,
      " ranks as asked");
  return result;
}

} // namespace

// -- the group ------------------------------------------------------------------------------

EmulatedGroup::EmulatedGroup(
    int rank,
    int size,
    const LinkModel& link,
    std::chrono::milliseconds timeout,
    Unlocked unlocked)
    : EmulatedGroup(
          rank,
          size,
          std::make_shared<EmulatedLink>(rank, link, timeout),
          0,
          std::move(unlocked)) {
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < size,
      "rank must be in 0..",
      size - 1,
      " (world size less 1), got ",
      rank);
}

c10::intrusive_ptr<EmulatedGroup> EmulatedGroup::beside() const {
  return c10::make_intrusive<EmulatedGroup>(
      getRank(), getSize(), link_, link_->add_communicator(), unlocked_);
}

EmulatedGroup::~EmulatedGroup() {
  EmulatedGroup::shutdown();
}

void EmulatedGroup::shutdown() {
  if (communicator_ == 0) {
    unlocked_([this] { link_->stop(); });
  }
}

void EmulatedGroup::startCoalescing() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!coalesced_, "startCoalescing() was called twice");
  coalesced_.emplace();
}

EmulatedGroup::WorkPtr EmulatedGroup::endCoalescing() {
  std::optional<Transfer> all;
  {
    const std::lock_guard lock(mutex_);
    all = std::exchange(coalesced_, std::nullopt);
  }
  TORCH_CHECK(all, "endCoalescing() without startCoalescing()");
  all->op = c10d::OpType::COALESCED;
  ++sequence_;
  return link_->carry(std::move(*all), communicator_);
}

EmulatedGroup::WorkPtr EmulatedGroup::issue(MirroredCall call) {
  Transfer& one = call.transfer;
  one.ns = transfer_ns(link(), call.traffic, call.nbytes, size_);
  {
    const std::lock_guard lock(mutex_);
    if (coalesced_) {
      Transfer& all = *coalesced_;
      all.ns += one.ns;
      all.async = one.async;
      all.outputs.insert(all.outputs.end(), one.outputs.begin(), one.outputs.end());
      std::move(one.moves.begin(), one.moves.end(), std::back_inserter(all.moves));
      return {};
    }
  }
  ++sequence_;
  return link_->carry(std::move(one), communicator_);
}

// -- gathers --------------------------------------------------------------------------------

EmulatedGroup::WorkPtr EmulatedGroup::allgather(
    std::vector<Tensors>& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  MirroredCall call(
      *this, OpType::ALLGATHER, Traffic::AllGather, options.asyncOp, 0, only(outputs));
  for (const at::Tensor& output : call.transfer.outputs) {
    call.add(output, inputs.at(0), {});
  }
  call.nbytes = nbytes_of(call.transfer.outputs);
  return issue(std::move(call));
}

EmulatedGroup::WorkPtr EmulatedGroup::_allgather_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::AllgatherOptions& options) {
  MirroredCall call(*this, OpType::_ALLGATHER_BASE, Traffic::AllGather, options.asyncOp);
  call.gather(output, input);
  return issue(std::move(call));
}

EmulatedGroup::WorkPtr EmulatedGroup::gather(
    std::vector<Tensors>& outputs,
    Tensors& inputs,
    const c10d::GatherOptions& options) {
  MirroredCall call(*this, OpType::GATHER, Traffic::Gather, options.asyncOp);
  call.nbytes = nbytes_of(inputs) * size_;
  if (options.rootRank == rank_) {
    call.transfer.outputs = only(outputs);
    for (const at::Tensor& output : call.transfer.outputs) {
      call.add(output, inputs.at(0), {});
    }
  }
  return issue(std::move(call));
}

// -- reductions -----------------------------------------------------------------------------

EmulatedGroup::WorkPtr EmulatedGroup::allreduce(
    Tensors& tensors,
    const c10d::AllreduceOptions& options) {
  MirroredCall call(
      *this, OpType::ALLREDUCE, Traffic::AllReduce, options.asyncOp, nbytes_of(tensors), tensors);
  for (const at::Tensor& tensor : tensors) {
    call.add(tensor, tensor, call.combination(options.reduceOp));
  }
  return issue(std::move(call));
}

EmulatedGroup::WorkPtr EmulatedGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  MirroredCall call(
      *this, OpType::REDUCE, Traffic::Reduce, options.asyncOp, nbytes_of(tensors), tensors);
  for (const at::Tensor& tensor : tensors) {
    if (options.rootRank == rank_) {
      call.add(tensor, tensor, call.combination(options.reduceOp));
    }
  }
  return issue(std::move(call));
}

EmulatedGroup::WorkPtr EmulatedGroup::reduce_scatter(
    Tensors& outputs,
    std::vector<Tensors>& inputs,
    const c10d::ReduceScatterOptions& options) {
  MirroredCall call(
      *this, OpType::REDUCE_SCATTER, Traffic::ReduceScatter, options.asyncOp, 0, outputs);
  const Tensors& slices = only(inputs);
  call.add(outputs.at(0), slices.at(rank_), call.combination(options.reduceOp));
  call.nbytes = nbytes_of(slices);
  return issue(std::move(call));
}

EmulatedGroup::WorkPtr EmulatedGroup::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  MirroredCall call(*this, OpType::_REDUCE_SCATTER_BASE, Traffic::ReduceScatter, options.asyncOp);
  call.reduce(output, input, options.reduceOp);
  return issue(std::move(call));
}

// -- the others -----------------------------------------------------------------------------

EmulatedGroup::WorkPtr EmulatedGroup::broadcast(
    Tensors& tensors,
    const c10d::BroadcastOptions& options) {
  return issue(MirroredCall(
      *this, OpType::BROADCAST, Traffic::Broadcast, options.asyncOp, nbytes_of(tensors), tensors));
}

EmulatedGroup::WorkPtr EmulatedGroup::scatter(
    Tensors& outputs,
    std::vector<Tensors>& inputs,
    const c10d::ScatterOptions& options) {
  TORCH_CHECK_VALUE(
      options.rootRank == rank_,
      "scatter on the emulated link: the data of rank ",
      options.rootRank,
      " is not known here; scatter from rank ",
      rank_);
  MirroredCall call(*this, OpType::SCATTER, Traffic::Scatter, options.asyncOp, 0, outputs);
  const Tensors& slices = only(inputs);
  call.add(outputs.at(0), slices.at(rank_), {});
  call.nbytes = nbytes_of(slices);
  return issue(std::move(call));
}

EmulatedGroup::WorkPtr EmulatedGroup::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  MirroredCall call(*this, OpType::ALLTOALL_BASE, Traffic::AllToAll, options.asyncOp, 0, {output});
  const std::vector<int64_t> sent = rows(input, input_splits, size_);
  const std::vector<int64_t> received = rows(output, output_splits, size_);
  const int64_t first = std::accumulate(sent.begin(), sent.begin() + rank_, int64_t{0});
  // A mirror sends what this rank sends to itself; zeros where more is expected of it.
  const at::Tensor own = input.detach().narrow(0, first, sent[rank_]);
  int64_t row = 0;
  for (const int64_t count : received) {
    const at::Tensor part = output.detach().narrow(0, row, count);
    const int64_t common = std::min(count, sent[rank_]);
    call.add(part.narrow(0, 0, common), own.narrow(0, 0, common), {});
    const at::Tensor rest = part.narrow(0, common, count - common);
    call.add(rest, rest, {Kind::Zero, 1.0});
    row += count;
  }
  call.nbytes = static_cast<int64_t>(std::max(input.nbytes(), output.nbytes()));
  return issue(std::move(call));
}

EmulatedGroup::WorkPtr EmulatedGroup::alltoall(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllToAllOptions& options) {
  MirroredCall call(
      *this, OpType::ALLTOALL, Traffic::AllToAll, options.asyncOp, nbytes_of(inputs), outputs);
  for (const at::Tensor& output : outputs) {
    call.add(output, inputs.at(rank_), {});
  }
  return issue(std::move(call));
}

EmulatedGroup::WorkPtr EmulatedGroup::barrier(const c10d::BarrierOptions& options) {
  return issue(MirroredCall(*this, OpType::BARRIER, Traffic::Barrier, options.asyncOp));
}

} // namespace zerocore
