// Sends gradients to the host when a backward completes them, and sums their squares there. See
// Note [Order of an update] in engine/offload/offload.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/offload/host_gradients.h"
#include "engine/offload/step_worker.h"
#include "engine/unit/unit.h"

namespace zerocore {

class GradientOffload {
 public:
  // All arguments must outlive the object.
  GradientOffload(const Units& units, const UnitContext& context, StepWorker& worker);

  // Sends a region's complete gradient to the host. `kept` is this rank's part of it, 1-D.
  void grad_ready(UnitId unit, int region, const at::Tensor& kept);
  // Waits until the unit's gradients have arrived, because they are about to change.
  void recall(UnitId unit);
  // Remembers the `.grad` tensors of the unit's shards, to notice later changes.
  void note_shown(UnitId unit);
  // Returns the gradient on the host. Copies it now if the user has changed or replaced it since it
  // was sent; no pending update may read the old one.
  at::Tensor landed(UnitId unit, int param, const at::Tensor& grad);
  // landed(), after waiting until the gradient has arrived.
  at::Tensor arrived(UnitId unit, int param, const at::Tensor& grad);

  // See Offload::known_squares.
  at::Tensor known_squares(UnitId unit, int param);
  void begin_step() {
    takes_squares_ = false;
  }

 private:
  // A gradient's memory and version.
  struct Shown {
    const void* data = nullptr;
    uint32_t version = 0;

    bool operator==(const Shown& other) const = default;
  };
  struct LandingUnit {
    explicit LandingUnit(ArrivedSquares squares_) : squares(std::move(squares_)) {}

    ArrivedSquares squares; // valid when the worker has reached sent_at
    std::optional<Bucket> landing; // the host's copy, if gradients are kept on the device
    std::vector<bool> sent; // by region: the gradient was sent to `landing`
    std::vector<Shown> shown; // by parameter: `.grad` at the time of sending
    StepWorker::Ticket sent_at = 0;
    std::shared_ptr<OpenRecord> squares_record; // trace of the last squares, with the wait
  };

  static Shown as_shown(const at::Tensor& grad);
  void make_landing(UnitId unit);
  void offload_grad(UnitId unit, int region, const at::Tensor& kept);
  void square(UnitId unit, int region, const at::Tensor& host);

  const Units& units_;
  const UnitContext& context_;
  StepWorker& worker_;
  std::vector<LandingUnit> states_; // by unit
  bool takes_squares_ = false; // sums squares when gradients arrive
};

} // namespace zerocore
