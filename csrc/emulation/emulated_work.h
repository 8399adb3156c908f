// The work of one collective on the emulated link, and the moves of its data.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace zerocore {

// -- the result of a collective whose peers all mirror this rank ---------------------------------

// The combination of N equal values: the value itself (average, minimum, maximum, bitwise and, or)
// or a multiple of it (sum). Zero stands for data that a mirror does not send.
struct Combination {
  enum class Kind : uint8_t { Copy, Scale, Zero };

  Kind kind = Kind::Copy;
  double factor = 1.0; // for Scale
};

// `to` becomes the combination of N times `from`. Both may be the same memory, but must not overlap
// otherwise. They have one shape, dtype and device.
struct Move {
  at::Tensor to;
  at::Tensor from;
  Combination combination;
};

// Returns a tensor over the storage's present memory. It keeps the storage alive, does not follow
// it to other memory, and belongs to no Python object.
at::Tensor alias_storage(const at::Tensor& tensor);

// Carries out a move: on the CPU in this thread, on a GPU on the current stream.
void carry_out(const Move& move);

// On the CPU the link's thread completes it, and wait() blocks the host. On a device a stream
// carries it out, and wait() only orders the current stream after it.
class EmulatedWork final : public c10d::Work {
  using Clock = std::chrono::steady_clock;

 public:
  EmulatedWork(
      int rank,
      c10d::OpType op,
      std::vector<at::Tensor> outputs,
      c10::Device device,
      std::chrono::milliseconds timeout);

  // Throws the collective's error, or an error after `timeout` (by default the group's).
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  bool isCompleted() override;
  void synchronize() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }
  // CPU: returns the nanoseconds that threads of this process have spent in wait() so far.
  static int64_t waited_ns();
  // CPU: returns the milliseconds from issue to completion of a finished collective.
  float getDuration() const override;

  // CPU: ends the work, with an error or null. Never throws.
  void complete(const std::exception_ptr& error);
  // Device: says that all moves were issued to the current stream, with `done` recorded after them.
  // `moves` live until the next wait().
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
