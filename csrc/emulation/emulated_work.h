// The handle of one collective on the emulated link.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <c10/core/Event.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "emulation/mirror.h"

namespace zerocore {

// On the CPU the link's thread completes it, and wait() blocks the host. On a device it is handed
// to the stream that carries it out, and wait() only orders the current stream behind it.
class EmulatedWork final : public c10d::Work {
  using Clock = std::chrono::steady_clock;

 public:
  EmulatedWork(
      int rank,
      c10d::OpType op,
      std::vector<at::Tensor> outputs,
      c10::Device device,
      std::chrono::milliseconds timeout);

  // Throws what went wrong, also that `timeout` (by default the group's) went by.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  bool isCompleted() override;
  void synchronize() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }
  // CPU: nanoseconds that threads of this process have spent in wait() so far.
  static int64_t waited_ns();
  // CPU: milliseconds from issue to completion, of a collective that is over.
  float getDuration() const override;

  // CPU: the collective is over. Never throws.
  void complete(const std::exception_ptr& error);
  // Device: everything was issued to the current stream, where `done` was recorded. `moves` stay
  // alive until someone waits.
  void issued(std::shared_ptr<c10::Event> done, std::vector<Move> moves);

 private:
  const c10::Device device_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point issued_ = Clock::now();
  Clock::time_point completed_at_; // CPU only
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::shared_ptr<c10::Event> done_; // devices only
  std::vector<Move> moves_;
};

} // namespace zerocore
