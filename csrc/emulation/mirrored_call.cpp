// Messages of the mirrors of this rank.
#include "emulation/mirrored_call.h"

#include <utility>

namespace zerocore {

namespace {

using Kind = Combination::Kind;

// The name that torch 2.11 has; later ones keep it.
double premul_factor(const c10d::ReduceOp& op) {
  const auto* premul = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(premul != nullptr, "PREMUL_SUM came without its factor");
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
      "the emulated link makes no product and no exclusive or");
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
      "the emulated link would move ",
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

} // namespace zerocore
