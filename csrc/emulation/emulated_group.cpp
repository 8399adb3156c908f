// The emulated group's collectives: their moves, and the bytes that cross the link.
#include "emulation/emulated_group.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace zerocore {

namespace {

using Kind = Combination::Kind;

// Torch 2.11 has the supplement under this name; later releases keep it.
double premul_factor(const c10d::ReduceOp& op) {
  const auto* premul = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(premul != nullptr, "PREMUL_SUM needs a factor");
  return premul->tensor_factor.defined() ? premul->tensor_factor.item<double>()
                                         : premul->double_factor;
}

} // namespace

MirroredCall::MirroredCall(
    const c10d::Backend& group,
    c10d::OpType op,
    Traffic traffic_,
    bool async,
    int64_t nbytes_,
    std::vector<at::Tensor> outputs)
    : traffic(traffic_),
      nbytes(nbytes_),
      transfer{op, async, std::move(outputs), {}, 0.0},
      rank_(group.getRank()),
      size_(group.getSize()) {}

Combination MirroredCall::combination(const c10d::ReduceOp& op) const {
  const auto n = static_cast<double>(size_);
  TORCH_CHECK_VALUE(
      op.op_ != c10d::ReduceOp::PRODUCT && op.op_ != c10d::ReduceOp::BXOR,
      "the emulated link has no reductions PRODUCT and BXOR");
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return {Kind::Scale, n};
    case c10d::ReduceOp::PREMUL_SUM:
      return {Kind::Scale, n * premul_factor(op)};
    default:
      return {Kind::Copy, 1.0};
  }
}

void MirroredCall::add(const at::Tensor& to, const at::Tensor& from, Combination how) {
  TORCH_CHECK_VALUE(
      to.numel() == from.numel() && to.dtype() == from.dtype(),
      "the emulated link cannot move ",
      from.numel(),
      " elements of ",
      from.dtype(),
      " into ",
      to.numel(),
      " of ",
      to.dtype(),
      "; the tensors of a collective must match");
  if (to.numel() == 0 || (how.kind == Kind::Copy && to.data_ptr() == from.data_ptr())) {
    return;
  }
  transfer.moves.push_back({alias_storage(to), alias_storage(from).view_as(to), how});
}

void MirroredCall::check_slices(const char* what, const at::Tensor& full, const at::Tensor& slice)
    const {
  TORCH_CHECK_VALUE(
      full.is_contiguous() && full.numel() == slice.numel() * size_,
      what,
      " must be contiguous with ",
      slice.numel() * size_,
      " elements, got ",
      full.numel());
}

void MirroredCall::gather(const at::Tensor& full, const at::Tensor& own) {
  check_slices("all_gather: the output", full, own);
  const at::Tensor slices = full.detach().view({size_, -1});
  const at::Tensor sent = own.detach().view(-1);
  const auto fill = [&](int64_t begin, int64_t end) {
    add(slices.narrow(0, begin, end - begin), sent.expand({end - begin, sent.numel()}), {});
  };
  if (slices[rank_].data_ptr() == own.data_ptr()) {
    fill(0, rank_);
    fill(rank_ + 1, size_);
  } else {
    fill(0, size_);
  }
  transfer.outputs.push_back(full);
  nbytes += static_cast<int64_t>(full.nbytes());
}

void MirroredCall::reduce(
    const at::Tensor& shard,
    const at::Tensor& full,
    const c10d::ReduceOp& op) {
  check_slices("reduce_scatter: the input", full, shard);
  if (shard.numel() > 0) {
    const at::Tensor own = full.detach().view({size_, -1})[rank_];
    add(shard.detach().view(-1), own, combination(op));
  }
  transfer.outputs.push_back(shard);
  nbytes += static_cast<int64_t>(full.nbytes());
}

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

// Returns the rows (of dimension 0) for or from each rank; equally many if `splits` is empty.
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
      " rows do not match the splits over ",
      world_size,
      " ranks");
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
  // A mirror sends the rows that this rank sends to itself, and zeros for any further rows.
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
