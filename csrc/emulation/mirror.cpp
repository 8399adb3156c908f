// Copies and scales one rank's data, as if all ranks had sent it.
#include "emulation/mirror.h"

#include <ATen/Dispatch.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/pow.h>
#include <c10/core/InferenceMode.h>

#include <cstring>

namespace zerocore {

namespace {

bool is_plain(const Move& move) {
  return move.to.is_cpu() && move.to.is_contiguous() && move.from.is_contiguous() &&
      move.to.dtype() == move.from.dtype();
}

// One row goes to every row of a matrix.
bool repeats_a_row(const Move& move) {
  return move.to.dim() == 2 && move.to.is_contiguous() && move.from.stride(0) == 0 &&
      move.from.stride(1) == 1;
}

void copy_to_each_row(const Move& move) {
  const size_t nbytes = move.to.nbytes() / move.to.size(0);
  const at::Tensor from = move.from.select(0, 0);
  for (int64_t row = 0; row < move.to.size(0); ++row) {
    if (move.to.is_cpu()) { // not by copy_, which would use the cores that compute
      auto* to = static_cast<char*>(move.to.data_ptr()) + row * nbytes;
      std::memcpy(to, from.const_data_ptr(), nbytes);
    } else {
      move.to.select(0, row).copy_(from, /*non_blocking=*/true);
    }
  }
}

void copy(const Move& move) {
  if (is_plain(move)) {
    if (move.to.data_ptr() != move.from.data_ptr()) {
      std::memcpy(move.to.data_ptr(), move.from.const_data_ptr(), move.to.nbytes());
    }
  } else if (repeats_a_row(move)) {
    // CUDA copies contiguous memory by cudaMemcpyAsync. It copies an expanded tensor by a kernel
    // that reads single elements and takes all SMs from the compute.
    copy_to_each_row(move);
  } else {
    at::Tensor to = move.to;
    to.copy_(move.from, /*non_blocking=*/true);
  }
}

// Whole for whole numbers, so that their type is kept.
at::Scalar factor_for(const Move& move) {
  const double factor = move.combination.factor;
  return at::isIntegralType(move.to.scalar_type(), /*includeBool=*/true)
      ? at::Scalar(static_cast<int64_t>(factor))
      : at::Scalar(factor);
}

void scale(const Move& move) {
  if (!is_plain(move) || !at::isFloatingType(move.to.scalar_type())) {
    at::Tensor to = move.to;
    // A number as a tensor: with a Scalar, mul_out() multiplies into new memory and copies that.
    at::mul_out(to, move.from, at::native::wrapped_scalar_tensor(factor_for(move)));
    return;
  }
  // Not by at::mul: it would use the cores that compute.
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, move.to.scalar_type(), "emulated_scale", [&] {
        using opmath_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
        const auto factor = static_cast<opmath_t>(move.combination.factor);
        const scalar_t* from = move.from.const_data_ptr<scalar_t>();
        auto* to = move.to.mutable_data_ptr<scalar_t>();
        for (int64_t i = 0; i < move.to.numel(); ++i) {
          to[i] = static_cast<scalar_t>(static_cast<opmath_t>(from[i]) * factor);
        }
      });
}

} // namespace

at::Tensor alias_storage(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(),
      tensor.sizes(),
      tensor.strides(),
      [storage = tensor.storage()](void*) {},
      tensor.options().requires_grad(false),
      tensor.device());
}

void carry_out(const Move& move) {
  const c10::InferenceMode normal(false);
  const at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor to = move.to;
  switch (move.combination.kind) {
    case Combination::Kind::Copy:
      copy(move);
      break;
    case Combination::Kind::Scale:
      scale(move);
      break;
    case Combination::Kind::Power:
      at::pow_out(to, move.from, static_cast<int64_t>(move.combination.factor));
      break;
    case Combination::Kind::Zero:
      to.zero_();
      break;
  }
}

} // namespace zerocore
