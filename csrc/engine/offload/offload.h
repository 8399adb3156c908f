// The optimizer step on the host: gradients arrive there, the host updates the units in the order
// of the forward, and sends their weights back at once. See Note [States on the host].
//
// Note [Order of an update]
// One worker thread runs all submitted work in order. A region's gradient is sent when its
// reduction is complete, while the rest of the backward runs. If an earlier step asked for the
// gradient norm, the worker then sums the squares, chunk by chunk, and the next step only adds
// these sums. A device with streams that keeps its gradients sums them itself, in the step, because
// its memory is much faster than the host's.
// The update of a unit and the return of its weights follow. The next forward waits for a unit's
// weights before it gathers or uses them, so the host updates later units while the forward
// computes earlier ones. All other readers and writers of this memory wait for all updates.
// Versions are counted when work is submitted, so they are the same on all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/offload/gradient_offload.h"
#include "engine/offload/host_gradients.h"
#include "engine/offload/step_worker.h"
#include "engine/unit/offloaded_states.h"
#include "engine/unit/unit.h"
#include "kernels/optimizer_ops.h"
#include "plan/memory_plan.h"

namespace zerocore {

// The tensors of an update. Gradients may be on the device.
struct HostUpdate {
  UnitId unit = -1;
  std::vector<int> params; // indices in the unit
  std::vector<at::Tensor> weights, grads, exp_avgs, exp_avg_sqs, steps, model_weights;
  kernels::AdamWOptions options;
  kernels::AdamWScalarTensors scalars;
  std::vector<std::pair<at::Tensor, at::Tensor>> casts; // (to, from), copied after the update
};

// Owns the worker thread and the offloaded states of a model.
class Offload {
 public:
  // `units` must outlive the object, which does nothing if all states are on the device.
  // `num_threads` threads share an update.
  Offload(const Units& units, const UnitContext& context, int num_threads);
  // Waits for all work.
  ~Offload();

  // -- memory
  // Give the units their file or their host memory. Call them before Unit::materialize.
  void open_disk(const std::string& folder, const std::string& name);
  void map_host_memory();
  // See Moments::make. Returns an empty vector if states are on the device.
  std::vector<at::Tensor> make_moments(UnitId unit, int param);
  // Returns null if no state is on the host.
  const HostStates* host_states() const {
    return context_.host;
  }
  // Returns the bytes on the host and on disk, without the optimizer's moments.
  HostBytes host_bytes() const;
  bool lands_gradients() const {
    return context_.lands_gradients();
  }

  // -- gradients
  // Copies `from` to the kept gradient, or adds it; see HostGradients.
  void offload_grad(UnitId unit, const at::Tensor& from, const at::Tensor& kept, bool adds);
  // Sends a region's complete gradient to the host. `kept` is this rank's part of it, 1-D.
  void grad_ready(UnitId unit, int region, const at::Tensor& kept);
  // Waits until no work reads the unit's gradients, because they are about to change.
  void recall(UnitId unit);
  // Remembers the `.grad` tensors of the unit's shards, to notice later changes.
  void note_shown(UnitId unit);

  // Returns the sums of squares of a parameter's gradient by chunk, see kernels::squares_by_chunk,
  // and waits for them. Undefined if the worker did not sum them, or if the gradient has changed
  // since. Makes the worker sum squares as gradients arrive, until the next step.
  at::Tensor known_squares(UnitId unit, int param);

  // Returns the host's copy of a gradient, when it has arrived. The host must update the parameter.
  at::Tensor arrived_gradient(UnitId unit, int param);

  // -- updates
  // Begins an optimizer's step: waits for updates, and throws as wait_updates() does.
  void begin_step();
  // Returns whether the parameter's states are on the host.
  bool updates(UnitId unit, int param) const;
  // Updates parameters on the worker. Checks the arguments now; throws as kernels::AdamWUpdate.
  void update(HostUpdate update);
  // Takes the order of the updates in the next step on disk; end_step() says that all of them were
  // submitted.
  void order_updates(std::vector<UnitId> order) {
    order_ = std::move(order);
  }
  void end_step();
  // Sends a unit's weights to the device. Call it after the unit's last update.
  void send(UnitId unit);
  // Returns whether send() was called since the last call, or there are no weights to send.
  bool take_sent(UnitId unit);

  // Waits until the worker has sent a unit's weights; streams wait for the copy. Does not throw if
  // the update failed, so that all ranks reach the all-gather.
  void wait_weights(UnitId unit);
  // Throws the worker's first error, once.
  void check();
  // Wait for all updates, or for all work, then throw as check() does. Later work of the compute
  // stream waits for the sent weights.
  void wait_updates();
  void synchronize();
  // Leaks the worker, which has no thread in the child of a fork.
  void mark_forked();

 private:
  struct OffloadedUnit {
    StepWorker::Ticket updated_at = 0;
    StepWorker::Ticket sent_at = 0; // 0 after the wait for it
    bool sent = false; // see take_sent()
    std::shared_ptr<OpenRecord> record; // trace of the last update or send, with the wait
  };

  void wait(StepWorker::Ticket ticket, const std::shared_ptr<OpenRecord>& record = nullptr);
  void begin_disk_step();
  void bring_states(UnitId unit) const;
  void give_back(UnitId unit);
  void wait_work();
  void order_compute() const;
  void check_disk() const;

  const Units& units_;
  UnitContext context_;
  std::vector<OffloadedUnit> states_; // by unit; empty without states on the host
  std::vector<UnitId> order_; // see order_updates()
  bool is_open_ = false; // a step on disk has begun and not ended
  StepWorker::Ticket last_update_ = 0;
  std::optional<GradientOffload> gradients_; // set if states are on the host
  std::optional<HostGradients> host_gradients_; // set if a device keeps its gradients on the host
  std::vector<StepWorker::Ticket> landed_at_; // by unit: the work of its last host gradient
  std::optional<Moments> moments_; // set if states are on the host or disk
  std::unique_ptr<StepWorker> worker_; // last member: joined before the others are freed
};

} // namespace zerocore
