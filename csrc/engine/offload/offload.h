// A step whose states lie on the host: gradients come there, units are updated in the order of the
// forward, their weights go back at once. See Note [States on the host].
//
// Note [Order of an update]
// One worker carries out what is submitted, in order. A region's gradient is sent when its
// reduction is complete, under the rest of the backward; the host has it in memory of its own, or
// it is kept there. Behind that its squares are summed, chunk by chunk, where a step has asked for
// the norm before: the next step only adds what is known. That is where the host keeps them; a
// device with streams sums its own gradients in the step, in one pass over memory that is much
// faster than the host's.
// An update of a unit is submitted next, then the return of its weights. The next forward waits for
// a unit's weights before it gathers or uses them, so later units are updated under the forward of
// earlier ones. All other readers and writers of the memory that an update works on wait for all
// of them. Versions count when work is submitted: they are the same on all ranks, whatever the
// worker has done.
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

// The tensors of an update; those of the gradients may lie on the device.
struct HostUpdate {
  UnitId unit = -1;
  std::vector<int> params; // of the unit
  std::vector<at::Tensor> weights, grads, exp_avgs, exp_avg_sqs, steps, model_weights;
  kernels::AdamWOptions options;
  kernels::AdamWScalarTensors scalars;
  std::vector<std::pair<at::Tensor, at::Tensor>> casts; // to, from: behind the update
};

class Offload {
 public:
  // Units outlive it. Does nothing where the states are on the device. `num_threads` share an
  // update.
  Offload(const Units& units, const UnitContext& context, int num_threads);
  // Waits for all work.
  ~Offload();

  // -- memory
  // Gives the units their file or their mapping. Before any unit is materialized.
  void open_disk(const std::string& folder, const std::string& name);
  void map_host_memory();
  // See Moments; empty if there is no place for them either.
  std::vector<at::Tensor> make_moments(UnitId unit, int param);
  // Null if no state is on the host.
  const HostStates* host_states() const {
    return context_.host;
  }
  // Bytes on the host and on disk, without the optimizer's.
  HostBytes host_bytes() const;
  bool lands_gradients() const {
    return context_.lands_gradients();
  }

  // -- gradients
  // `from` is to be copied to the gradient `kept`, see HostGradients.
  void offload_grad(UnitId unit, const at::Tensor& from, const at::Tensor& kept, bool adds);
  // A region's gradient is complete; `kept` is this rank's part of it, 1-D.
  void grad_ready(UnitId unit, int region, const at::Tensor& kept);
  // The unit's gradients are going to change. Blocks until nobody reads them.
  void recall(UnitId unit);
  // The parameters of the unit show their gradients now.
  void note_shown(UnitId unit);

  // The sums of squares of a parameter's gradient by chunk, as kernels::squares_by_chunk has them;
  // undefined where they are not known, or the gradient has changed since. Blocks until they are
  // there. From now to the next step they are taken as gradients arrive.
  at::Tensor known_squares(UnitId unit, int param);

  // The gradient of a parameter that is updated on the host, there. Blocks until it has come.
  at::Tensor arrived_gradient(UnitId unit, int param);

  // -- updates
  // An optimizer steps next. As wait_updates().
  void begin_step();
  // Whether the parameter's states are on the host.
  bool updates(UnitId unit, int param) const;
  // Updates parameters on the worker. Arguments are checked here; throws as kernels::AdamWUpdate.
  void update(HostUpdate update);
  // Of a step that AdamW takes: the units that it may update, in order, and that it has updated
  // all.
  void order_updates(std::vector<UnitId> order) {
    order_ = std::move(order);
  }
  void end_step();
  // Behind the last update of a unit: sends its weights to the device.
  void send(UnitId unit);
  // Whether that was asked for since the last call, or no weights go back.
  bool take_sent(UnitId unit);

  // Blocks until a unit's weights are on the device, well or not: ranks gather them together.
  void wait_weights(UnitId unit);
  // Throws what went wrong on the worker, once.
  void check();
  // Block until all updates are done, and until all work is; then as check(). Later work of the
  // compute stream comes behind the weights that they have sent.
  void wait_updates();
  void synchronize();
  // In the child of a fork, where the worker has no thread: nothing is waited for or freed.
  void mark_forked();

 private:
  struct OffloadedUnit {
    StepWorker::Ticket updated_at = 0;
    StepWorker::Ticket sent_at = 0; // 0 once it was waited for
    bool sent = false;
    std::shared_ptr<OpenRecord> record; // of what the next forward waits for
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
  std::vector<OffloadedUnit> states_; // by unit; none without states on the host
  std::vector<UnitId> order_; // of a step that has not begun
  bool is_open_ = false; // a step on disk has begun and not ended
  StepWorker::Ticket last_update_ = 0;
  std::optional<GradientOffload> gradients_; // none without states on the host
  std::optional<HostGradients> host_gradients_; // none unless a device keeps its gradients there
  std::vector<StepWorker::Ticket> landed_at_; // by unit
  std::optional<Moments> moments_; // none without a place for them
  std::unique_ptr<StepWorker> worker_; // ends first
};

} // namespace zerocore
