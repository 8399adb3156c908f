// Completion of emulated collectives.
#include "emulation/emulated_work.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>

#include <atomic>
#include <utility>

namespace zerocore {

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
      "only a collective of the CPU that is over has a duration; time others by events of the "
      "stream that waits");
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
