// Moves the data of collectives, and completes their works.
#include "emulation/emulated_work.h"

#include <ATen/Dispatch.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

namespace zerocore {

namespace {

bool is_plain(const Move& move) {
  return move.to.is_cpu() && move.to.is_contiguous() && move.from.is_contiguous() &&
      move.to.dtype() == move.from.dtype();
}

// Returns whether the move copies one row to every row of a matrix.
bool repeats_a_row(const Move& move) {
  return move.to.dim() == 2 && move.to.is_contiguous() && move.from.stride(0) == 0 &&
      move.from.stride(1) == 1 && move.to.dtype() == move.from.dtype();
}

// One copy_ of the expanded row would use the compute cores, and on a GPU an element-wise kernel.
// Copies of contiguous ranges are memcpys; on a GPU each copy doubles the rows.
void repeat_row(const Move& move) {
  const int64_t rows = move.to.size(0);
  const size_t nbytes = move.to.nbytes() / rows;
  for (int64_t row = 0; move.to.is_cpu() && row < rows; ++row) {
    auto* to = static_cast<char*>(move.to.data_ptr()) + row * nbytes;
    std::memcpy(to, move.from.const_data_ptr(), nbytes);
  }
  for (int64_t done = 0; !move.to.is_cpu() && done < rows;) {
    const int64_t count = std::min(std::max<int64_t>(done, 1), rows - done);
    const at::Tensor from = done == 0 ? move.from.narrow(0, 0, 1) : move.to.narrow(0, 0, count);
    move.to.narrow(0, done, count).copy_(from, /*non_blocking=*/true);
    done += count;
  }
}

void copy(const Move& move) {
  if (is_plain(move)) {
    if (move.to.data_ptr() != move.from.data_ptr()) {
      std::memcpy(move.to.data_ptr(), move.from.const_data_ptr(), move.to.nbytes());
    }
  } else if (repeats_a_row(move)) {
    repeat_row(move);
  } else {
    at::Tensor to = move.to;
    to.copy_(move.from, /*non_blocking=*/true);
  }
}

// Returns an integer for integer tensors, to keep their dtype.
at::Scalar factor_for(const Move& move) {
  const double factor = move.combination.factor;
  return at::isIntegralType(move.to.scalar_type(), /*includeBool=*/true)
      ? at::Scalar(static_cast<int64_t>(factor))
      : at::Scalar(factor);
}

void scale(const Move& move) {
  if (!is_plain(move) || !at::isFloatingType(move.to.scalar_type())) {
    at::Tensor to = move.to;
    // Passes the factor as a tensor: with a Scalar, mul_out() multiplies into new memory and copies
    // the result.
    at::mul_out(to, move.from, at::native::wrapped_scalar_tensor(factor_for(move)));
    return;
  }
  // Avoids at::mul, which would use the compute cores.
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
    case Combination::Kind::Zero:
      to.zero_();
      break;
  }
}

namespace {

std::atomic<int64_t> total_waited_ns = 0;

c10::intrusive_ptr<c10::ivalue::Future> make_future(c10::Device device) {
  auto type = c10::ListType::create(c10::TensorType::get());
  std::vector<c10::Device> devices;
  if (!device.is_cpu()) {
    devices.push_back(device);
  }
  return c10::make_intrusive<c10::ivalue::Future>(std::move(type), std::move(devices));
}

} // namespace

EmulatedWork::EmulatedWork(
    int rank,
    c10d::OpType op,
    std::vector<at::Tensor> outputs,
    c10::Device device,
    std::chrono::milliseconds timeout)
    : Work(rank, op),
      device_(device),
      timeout_(timeout),
      outputs_(std::move(outputs)),
      future_(make_future(device)) {}

bool EmulatedWork::wait(std::chrono::milliseconds timeout) {
  if (!device_.is_cpu()) {
    synchronize();
    return true;
  }
  const auto count_time = c10::make_scope_exit([begin = Clock::now()] {
    total_waited_ns += std::chrono::nanoseconds(Clock::now() - begin).count();
  });
  return Work::wait(timeout == kNoTimeout ? timeout_ : timeout);
}

bool EmulatedWork::isCompleted() {
  return device_.is_cpu() ? Work::isCompleted() : done_ != nullptr && done_->query();
}

void EmulatedWork::synchronize() {
  if (done_ != nullptr) {
    done_->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    moves_.clear();
  }
}

int64_t EmulatedWork::waited_ns() {
  return total_waited_ns;
}

float EmulatedWork::getDuration() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(
      device_.is_cpu() && completed_,
      "getDuration() needs a finished collective on the CPU; time others with events of the "
      "waiting stream");
  return std::chrono::duration<float, std::milli>(completed_at_ - issued_).count();
}

void EmulatedWork::complete(const std::exception_ptr& error) {
  completed_at_ = Clock::now(); // published by finish()
  finish(error);
  if (error != nullptr) {
    future_->setErrorIfNeeded(error);
  } else {
    future_->markCompleted(outputs_);
  }
}

void EmulatedWork::issued(std::shared_ptr<c10::Event> done, std::vector<Move> moves) {
  done_ = std::move(done);
  moves_ = std::move(moves);
  future_->markCompleted(outputs_);
}

} // namespace zerocore
