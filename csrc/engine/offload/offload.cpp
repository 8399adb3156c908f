#include "engine/offload/offload.h"

#include <c10/core/DeviceGuard.h>

#include "common/types.h"
#include "engine/graph/autograd.h"

namespace zerocore {

Offload::Offload(const Units& units, const UnitContext& context, int num_threads)
    : units_(units),
      context_(context),
      worker_(std::make_unique<StepWorker>(context.streams->device(), num_threads)) {
  if (context_.host != nullptr) {
    context_.host->plan(units, context_);
  }
  if (context_.lands_gradients()) {
    host_gradients_.emplace(context_, *worker_);
    landed_at_.resize(units.size());
  }
  if (!context.tiers.has_host_states()) {
    return;
  }
  states_.resize(units.size());
  gradients_.emplace(units, context_, *worker_);
}

Offload::~Offload() {
  try {
    wait_work();
    if (worker_ != nullptr && !states_.empty()) { // the caller frees the memory that copies use
      Streams::synchronize(context_.streams->record(StreamRole::HostToDevice));
    }
    synchronize();
  } catch (const std::exception& error) {
    TORCH_WARN(
        "zerocore: an update on the host failed while the model was freed: ", message_of(error));
  }
}

// -- memory ---------------------------------------------------------------------------------

void Offload::open_disk(const std::string& folder, const std::string& name) {
  TORCH_CHECK_VALUE(context_.disk != nullptr, "no state of this model is on disk");
  context_.disk->open(folder, name, units_, context_);
  if (context_.tiers.states == Tier::Disk) {
    moments_.emplace(units_, context_);
  }
}

void Offload::map_host_memory() {
  TORCH_CHECK_VALUE(context_.host != nullptr, "no state of this model is on the host");
  const c10::OptionalDeviceGuard pinned_for(context_.streams->device());
  context_.host->open();
  if (context_.tiers.states == Tier::Host) {
    moments_.emplace(units_, context_);
  }
}

std::vector<at::Tensor> Offload::make_moments(UnitId id, int param) {
  if (!moments_) {
    return {};
  }
  if (moments_->had(id, param)) {
    wait_updates(); // make() zeroes the moments
  }
  return moments_->make(id, param);
}

HostBytes Offload::host_bytes() const {
  HostBytes bytes;
  if (context_.host != nullptr) {
    const HostLayout& layout = context_.host->layout();
    bytes.weights = layout.weights_nbytes();
    bytes.gradients = layout.gradients_nbytes();
    bytes.buffers = layout.gaps_nbytes();
  }
  if (context_.disk != nullptr) {
    bytes.buffers += context_.disk->buffers_nbytes();
    bytes.disk = context_.disk->file_nbytes();
  }
  return bytes;
}

void Offload::mark_forked() {
  static_cast<void>(worker_.release());
  if (context_.disk != nullptr) {
    context_.disk->mark_forked();
  }
}

// -- gradients ------------------------------------------------------------------------------

void Offload::offload_grad(UnitId id, const at::Tensor& from, const at::Tensor& kept, bool adds) {
  landed_at_[id] = host_gradients_->offload_grad(*units_[id], from, kept, adds);
}

void Offload::grad_ready(UnitId id, int region, const at::Tensor& kept) {
  if (gradients_) {
    gradients_->grad_ready(id, region, kept);
  }
}

void Offload::recall(UnitId id) {
  if (host_gradients_) {
    wait(landed_at_[id]);
  }
  if (gradients_) {
    wait(states_[id].updated_at);
    gradients_->recall(id);
  }
}

void Offload::note_shown(UnitId id) {
  if (gradients_) {
    gradients_->note_shown(id);
  }
}

at::Tensor Offload::known_squares(UnitId id, int param) {
  const at::Tensor squares = gradients_ ? gradients_->known_squares(id, param) : at::Tensor();
  if (!squares.defined() && host_gradients_) {
    wait(landed_at_[id]); // the caller squares the gradient itself
  }
  return squares;
}

at::Tensor Offload::arrived_gradient(UnitId id, int param) {
  TORCH_CHECK_VALUE(updates(id, param), "the parameter is not updated on the host");
  return gradients_->arrived(id, param, gradient_of(units_[id]->params()[param].shard));
}

// -- updates --------------------------------------------------------------------------------

bool Offload::updates(UnitId id, int param) const {
  const Layout& layout = units_.at(id)->layout();
  return !states_.empty() && layout.regions()[layout.places().at(param).region].requires_grad;
}

void Offload::update(HostUpdate given) {
  auto held = std::make_shared<HostUpdate>(std::move(given));
  int64_t nbytes = 0;
  for (size_t i = 0; i < held->grads.size(); ++i) {
    held->grads[i] = gradients_->landed(held->unit, held->params.at(i), held->grads[i]);
    nbytes += static_cast<int64_t>(held->weights.at(i).nbytes());
  }
  const kernels::AdamWTensors tensors{
      held->weights,
      held->grads,
      held->exp_avgs,
      held->exp_avg_sqs,
      held->steps,
      held->model_weights};
  kernels::AdamWUpdate step(tensors, held->options, held->scalars);
  begin_disk_step();
  OffloadedUnit& state = states_[held->unit];
  state.record = context_.note(TraceOp::HostUpdate, held->unit, nbytes);
  const StreamEvent loaded = units_[held->unit]->runner().loaded();
  last_update_ = worker_->submit(state.record, [this, held, loaded, step = std::move(step)] {
    Streams::synchronize(loaded); // the device may still copy the parameters
    bring_states(held->unit);
    step.run();
    for (const auto& [to, from] : held->casts) {
      to.copy_(from);
    }
  });
  state.updated_at = last_update_;
}

// The first update begins a step on disk.
void Offload::begin_disk_step() {
  if (DiskStates* disk = context_.disk; disk != nullptr && !std::exchange(is_open_, true)) {
    worker_->submit([disk, order = std::exchange(order_, {})] { disk->begin_step(order); });
  }
}

// Runs on the worker. If the disk fails, throws before the unit is updated.
void Offload::bring_states(UnitId id) const {
  if (context_.disk != nullptr) {
    context_.disk->bring(id);
  }
}

void Offload::give_back(UnitId id) {
  if (DiskStates* disk = context_.disk) {
    last_update_ = worker_->submit([disk, id] { disk->give_back(id); });
  }
}

void Offload::end_step() {
  if (std::exchange(is_open_, false) && worker_ != nullptr) {
    last_update_ = worker_->submit([disk = context_.disk] { disk->end_step(); });
  }
}

void Offload::send(UnitId id) {
  OffloadedUnit& state = states_.at(id);
  state.sent = true;
  if (!context_.tiers.returns_weights()) { // all-gathers load them from the host or the disk
    give_back(id);
    state.sent_at = worker_->last();
    return;
  }
  const Unit& unit = *units_[id];
  unit.main().order_send();
  state.record = context_.note(TraceOp::ToDevice, id, unit.main().sent_nbytes());
  state.sent_at = worker_->submit(state.record, [this, id, &unit] {
    bring_states(id);
    unit.main().send();
  });
  state.updated_at = last_update_ = state.sent_at;
  give_back(id);
}

bool Offload::take_sent(UnitId id) {
  return states_.empty() || std::exchange(states_[id].sent, false) ||
      !context_.tiers.returns_weights();
}

// -- waits ----------------------------------------------------------------------------------

void Offload::wait(StepWorker::Ticket ticket, const std::shared_ptr<OpenRecord>& record) {
  if (worker_ != nullptr && ticket > 0) {
    worker_->wait(ticket, record);
  }
}

void Offload::wait_weights(UnitId id) {
  if (states_.empty() || states_[id].sent_at == 0) {
    return;
  }
  OffloadedUnit& state = states_[id];
  wait(std::exchange(state.sent_at, 0), std::exchange(state.record, nullptr));
  for (const StreamRole role : {StreamRole::AllGather, StreamRole::Compute}) {
    context_.streams->order(role, StreamRole::HostToDevice);
  }
}

void Offload::check() {
  if ((states_.empty() && !host_gradients_) || worker_ == nullptr) {
    return;
  }
  auto error = worker_->take_error();
  if (error == nullptr && context_.tiers.parameters == Tier::Disk) {
    error = context_.disk->take_load_failure();
  }
  if (error != nullptr) {
    std::rethrow_exception(error);
  }
}

void Offload::begin_step() {
  wait_updates();
  if (gradients_) {
    gradients_->begin_step();
  }
}

void Offload::wait_updates() {
  end_step();
  wait(last_update_);
  order_compute();
  check();
  check_disk();
}

void Offload::wait_work() {
  end_step();
  wait(worker_ == nullptr ? 0 : worker_->last());
}

void Offload::synchronize() {
  check_not_capturing(context_.streams->device(), "a sharded model's work on the host was awaited");
  wait_work();
  for (const auto& unit : units_) {
    if (worker_ != nullptr) {
      Streams::synchronize(unit->runner().loaded());
    }
  }
  order_compute();
  check();
  check_disk();
}

// The worker only queues copies to the device, so the compute stream must wait for the copies.
void Offload::order_compute() const {
  if (!states_.empty() && worker_ != nullptr) {
    context_.streams->order(StreamRole::Compute, StreamRole::HostToDevice);
  }
}

// Throws the error of a failed read or write before the caller reads the lost bytes.
void Offload::check_disk() const {
  if (context_.disk != nullptr && worker_ != nullptr) {
    context_.disk->check();
  }
}

} // namespace zerocore
