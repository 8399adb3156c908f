// Gradients on the host: how they get there, and their sums of squares. See Note [Order of an
// update] in engine/offload/offload.h.
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
  // All outlive it.
  GradientOffload(const Units& units, const UnitContext& context, StepWorker& worker);

  // A region's gradient is complete; `kept` is this rank's part of it, 1-D.
  void grad_ready(UnitId unit, int region, const at::Tensor& kept);
  // The unit's gradients are going to change. Blocks until they have arrived.
  void recall(UnitId unit);
  // The parameters of the unit show their gradients now.
  void note_shown(UnitId unit);
  // The gradient on the host. One that was changed since it was sent, or set by hand, is copied
  // now; no update reads the one before any more.
  at::Tensor landed(UnitId unit, int param, const at::Tensor& grad);
  // The same; blocks until it has come.
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

    ArrivedSquares squares; // of the gradient that has come, or will be when the worker gets there
    std::optional<Bucket> landing; // gradients on the host, where they are kept on the device
    std::vector<bool> left; // by region: the landing has the gradient
    std::vector<Shown> shown; // by parameter: the gradient that the landing has
    StepWorker::Ticket left_at = 0;
    std::shared_ptr<OpenRecord> squares_record; // of what the next step waits for
  };

  static Shown as_shown(const at::Tensor& grad);
  void make_landing(UnitId unit);
  void offload_grad(UnitId unit, int region, const at::Tensor& kept);
  void square(UnitId unit, int region, const at::Tensor& host);

  const Units& units_;
  const UnitContext& context_;
  StepWorker& worker_;
  std::vector<LandingUnit> states_; // by unit
  bool takes_squares_ = false; // as gradients arrive
};

} // namespace zerocore
