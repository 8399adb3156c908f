// A step whose states lie on the host: gradients come there, units are updated in the order of the
// forward, their weights go back at once. See Note [States on the host].
//
// Note [Order of an update]
// One worker carries out what is submitted, in order. A region's gradient is sent when its
// reduction is complete, under the rest of the backward; the host has it in memory of its own, or
// it is kept there. An update of a unit is submitted behind it, then the return of its weights. The
// next forward waits for a unit's weights before it gathers or uses them, so later units are
// updated under the forward of earlier ones. Whoever else reads or writes the memory that an update
// works on waits for all of them. Versions count when work is submitted: they are the same on all
// ranks, whatever the worker has done.
#pragma once

#include <ATen/core/Tensor.h>

#include <future>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/step_worker.h"
#include "engine/unit.h"
#include "kernels/optimizer_ops.h"
#include "runtime/host_link.h"

namespace zerocore {

// The tensors of an update; those of the gradients may lie on the device.
struct HostUpdate {
  UnitId unit = -1;
  std::vector<int> params; // of the unit
  std::vector<at::Tensor> weights, grads, exp_avgs, exp_avg_sqs, steps, model_weights;
  kernels::AdamWOptions options;
  kernels::AdamWScalarTensors scalars;
  std::vector<std::pair<at::Tensor, at::Tensor>> casts; // to, from: behind the update
};

// A gradient's memory and version.
struct ShownGradient {
  const void* data = nullptr;
  uint32_t version = 0;

  bool operator==(const ShownGradient& other) const = default;
};

class Offload {
 public:
  // Units and the emulated link, null for none, outlive it. Does nothing where the states are on
  // the device.
  Offload(
      const std::vector<std::unique_ptr<Unit>>& units,
      const UnitContext& context,
      HostLink* link);
  // Waits for all work.
  ~Offload();
  Offload(const Offload&) = delete;
  Offload& operator=(const Offload&) = delete;

  // A region's gradient is complete; `kept` is this rank's part of it, 1-D.
  void leave(UnitId unit, int region, const at::Tensor& kept);
  // The unit's gradients are going to change. Blocks until nobody reads them.
  void recall(UnitId unit);
  // The parameters of the unit show their gradients now.
  void note_shown(UnitId unit);

  // Whether the parameter's states are on the host.
  bool updates(UnitId unit, int param) const;
  // Updates parameters on the worker. Arguments are checked here; throws as kernels::AdamWUpdate.
  void update(HostUpdate update);
  // Of a step that AdamW takes: the units that it may update, in order, and that it has updated
  // all.
  void begin_step(std::vector<UnitId> order) {
    order_ = std::move(order);
  }
  void end_step();
  // Behind the last update of a unit: sends its weights to the device.
  void send(UnitId unit);
  // Whether that was asked for since the last call.
  bool take_sent(UnitId unit);

  // Blocks until a unit's weights are on the device, well or not: ranks gather them together.
  void wait_weights(UnitId unit);
  // Throws what went wrong on the worker, once.
  void check();
  // Block until all updates are done, and until all work is; then as check().
  void wait_updates();
  void synchronize();
  // In the child of a fork, where the worker has no thread: nothing is waited for or freed.
  void mark_forked();
  DiskStates* disk() const { // null where nothing is on disk
    return context_.disk;
  }
  // Bytes on the host: of weights, and for gradients that are sent there.
  std::pair<int64_t, int64_t> host_nbytes() const;

 private:
  struct OffloadedUnit {
    std::optional<Bucket> landing; // gradients on the host, where they are kept on the device
    std::vector<bool> left; // by region: the landing has the gradient
    std::vector<ShownGradient> shown; // by parameter: the gradient that the landing has
    StepWorker::Ticket left_at = 0, updated_at = 0;
    StepWorker::Ticket sent_at = 0; // 0 once it was waited for
    bool sent = false;
    std::shared_future<void> arrived; // over the emulated link; set by the worker
  };

  void wait(StepWorker::Ticket ticket);
  static void make_landing(OffloadedUnit& state);
  void land(UnitId unit, int region, const at::Tensor& kept);
  at::Tensor landed(UnitId unit, int param, const at::Tensor& grad);
  StepWorker::Ticket submit(TraceOp op, UnitId unit, int64_t nbytes, StepWorker::Work work);
  StepWorker::Ticket submit(StepWorker::Work work);
  StepWorker::Ticket bring(UnitId unit, int64_t nbytes, StepWorker::Work copy);
  void announce(UnitId unit);
  void bring_states(UnitId unit) const;
  void give_back(UnitId unit);
  void send_over_link(UnitId unit);
  void wait_arrival(UnitId unit);
  void wait_arrivals();
  void finish(StepWorker::Ticket ticket);

  const std::vector<std::unique_ptr<Unit>>& units_;
  UnitContext context_;
  HostLink* link_;
  std::vector<OffloadedUnit> states_; // by unit; none without states on the host
  std::vector<UnitId> order_; // of a step that has not begun
  bool is_open_ = false; // a step on disk has begun and not ended
  StepWorker::Ticket last_ = 0, last_update_ = 0;
  std::exception_ptr arrival_error_; // of what the emulated link carried
  std::unique_ptr<StepWorker> worker_ = std::make_unique<StepWorker>(); // ends first
};

} // namespace zerocore
