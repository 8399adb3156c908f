// A step whose states lie on the host.
#include "engine/offload.h"

#include <algorithm>
#include <utility>

#include "engine/autograd.h"
#include "engine/disk_states.h"
#include "runtime/device_memory.h"

namespace zerocore {

namespace {

ShownGradient as_shown(const at::Tensor& grad) {
  if (!grad.defined() || grad.numel() == 0) {
    return {};
  }
  const auto version = grad.unsafeGetTensorImpl()->version_counter().current_version();
  return {grad.const_data_ptr(), version};
}

} // namespace

Offload::Offload(
    const std::vector<std::unique_ptr<Unit>>& units,
    const UnitContext& context,
    HostLink* link)
    : units_(units), context_(context), link_(link) {
  if (!context.tiers.has_host_states()) {
    return;
  }
  for (const auto& unit : units) {
    const Layout& layout = unit->layout();
    OffloadedUnit& state = states_.emplace_back();
    state.left.resize(layout.regions().size());
    state.shown.resize(unit->params().size());
    const std::vector<int> regions = context.tiers.landing_regions(layout);
    if (!regions.empty()) {
      const Layout kept = layout.of_shard(context.shard).retyped(&Region::grad);
      const std::string owner = "the gradient of unit '" + unit->name() + "'";
      state.landing.emplace(kept, regions, 0, c10::kCPU, owner);
    }
  }
}

Offload::~Offload() {
  try {
    synchronize();
  } catch (const std::exception& error) {
    TORCH_WARN("zerocore: an update on the host failed while the model was freed: ", error.what());
  }
}

StepWorker::Ticket Offload::submit(TraceOp op, UnitId unit, int64_t nbytes, StepWorker::Work work) {
  const auto record = context_.trace->add(op, unit, nbytes, context_.pool->stats().in_use_nbytes);
  return submit([record, work = std::move(work)] {
    if (record != nullptr) {
      record->issued_ns = now_ns();
    }
    work();
    if (record != nullptr) {
      record->done_ns = now_ns();
    }
  });
}

StepWorker::Ticket Offload::submit(StepWorker::Work work) {
  last_ = worker_->submit(std::move(work));
  return last_;
}

// -- gradients ------------------------------------------------------------------------------

void Offload::leave(UnitId id, int region, const at::Tensor& kept) {
  if (states_.empty()) {
    return;
  }
  OffloadedUnit& state = states_[id];
  if (!state.landing) {
    const auto nbytes = static_cast<int64_t>(kept.nbytes());
    state.left_at = bring(id, nbytes, [] {}); // it is kept on the host
  } else if (state.landing->has(region)) {
    make_landing(state);
    land(id, region, kept);
    state.left[region] = true;
  }
}

// Memory comes with the first gradient.
void Offload::make_landing(OffloadedUnit& state) {
  if (!state.landing->attached()) {
    state.landing->attach(allocate_memory(c10::kCPU, state.landing->nbytes()));
  }
}

// A device copies beside its other streams; on the CPU the worker does.
void Offload::land(UnitId id, int region, const at::Tensor& kept) {
  OffloadedUnit& state = states_[id];
  const Streams& streams = *context_.streams;
  const at::Tensor& host = state.landing->full(region);
  const auto nbytes = static_cast<int64_t>(kept.nbytes());
  if (!streams.has_streams()) {
    state.left_at = bring(id, nbytes, [host, kept] { host.copy_(kept); });
    return;
  }
  streams.order(StreamRole::DeviceToHost, StreamRole::Compute);
  streams.note_read(StreamRole::DeviceToHost, kept, "leaves", units_[id]->name());
  {
    const auto guard = streams.use(StreamRole::DeviceToHost);
    host.copy_(kept, /*non_blocking=*/true);
  }
  const StreamEvent copied = streams.record(StreamRole::DeviceToHost);
  state.left_at = submit(TraceOp::ToHost, id, nbytes, [copied] {
    if (copied->event) {
      copied->event->synchronize();
    }
  });
}

StepWorker::Ticket Offload::bring(UnitId id, int64_t nbytes, StepWorker::Work copy) {
  if (link_ == nullptr) {
    return submit(TraceOp::ToHost, id, nbytes, std::move(copy));
  }
  const auto record =
      context_.trace->add(TraceOp::ToHost, id, nbytes, context_.pool->stats().in_use_nbytes);
  const auto arrived = link_->carry(/*to_host=*/true, nbytes, std::move(copy), record);
  return submit([arrived] { arrived.get(); });
}

void Offload::recall(UnitId id) {
  if (!states_.empty()) {
    OffloadedUnit& state = states_[id];
    wait(std::max(state.left_at, state.updated_at));
    context_.streams->order(StreamRole::Compute, StreamRole::DeviceToHost);
    state.left.assign(state.left.size(), false);
  }
}

void Offload::note_shown(UnitId id) {
  if (states_.empty()) {
    return;
  }
  const auto& params = units_[id]->params();
  for (size_t i = 0; i < params.size(); ++i) {
    states_[id].shown[i] = as_shown(gradient_of(params[i].shard));
  }
}

// The gradient on the host. One that was changed since it was sent, or set by hand, is copied now.
at::Tensor Offload::landed(UnitId id, int param, const at::Tensor& grad) {
  OffloadedUnit& state = states_[id];
  if (!state.landing) {
    return grad;
  }
  make_landing(state);
  const Unit& unit = *units_[id];
  const int region = unit.layout().places()[param].region;
  const int64_t begin = unit.layout().offset_in_shard(param, context_.shard);
  const at::Tensor host = state.landing->view(region, begin, unit.shard_sizes(param));
  if (host.numel() > 0 && (!state.left[region] || as_shown(grad) != state.shown[param])) {
    wait(std::max(state.left_at, state.updated_at));
    host.copy_(grad);
  }
  return host;
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
    held->grads[i] = landed(held->unit, held->params.at(i), held->grads[i]);
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
  announce(held->unit);
  auto work = [this, held, step = std::move(step)] {
    bring_states(held->unit);
    step.run();
    for (const auto& [to, from] : held->casts) {
      to.copy_(from);
    }
  };
  last_update_ = submit(TraceOp::HostUpdate, held->unit, nbytes, std::move(work));
  states_[held->unit].updated_at = last_update_;
}

// A unit on disk is going to be updated; the first one of a step begins it.
void Offload::announce(UnitId id) {
  DiskStates* disk = context_.disk;
  if (disk == nullptr) {
    return;
  }
  disk->announce(id);
  if (!std::exchange(is_open_, true)) {
    submit([disk, order = std::exchange(order_, {})] { disk->begin_step(order); });
  }
}

// By the worker. What it cannot bring from the disk it does not touch.
void Offload::bring_states(UnitId id) const {
  if (context_.disk != nullptr) {
    context_.disk->bring(id);
  }
}

void Offload::give_back(UnitId id) {
  if (DiskStates* disk = context_.disk) {
    last_update_ = submit([disk, id] { disk->give_back(id); });
  }
}

void Offload::end_step() {
  if (std::exchange(is_open_, false) && worker_ != nullptr) {
    last_update_ = submit([disk = context_.disk] { disk->end_step(); });
  }
}

void Offload::send(UnitId id) {
  OffloadedUnit& state = states_.at(id);
  state.sent = true;
  if (!context_.tiers.returns_weights()) {
    give_back(id);
    state.sent_at = last_update_; // gathers load them from there
    return;
  }
  const Unit& unit = *units_[id];
  unit.main().order_send();
  if (link_ != nullptr) {
    send_over_link(id);
  } else {
    const int64_t nbytes = unit.main().sent_nbytes();
    state.sent_at = submit(TraceOp::ToDevice, id, nbytes, [this, id, &unit] {
      bring_states(id);
      unit.main().send();
    });
  }
  state.updated_at = last_update_ = state.sent_at;
  give_back(id);
}

// The worker goes on with the next unit meanwhile.
void Offload::send_over_link(UnitId id) {
  const Unit& unit = *units_[id];
  const int64_t nbytes = unit.main().sent_nbytes();
  const auto record =
      context_.trace->add(TraceOp::ToDevice, id, nbytes, context_.pool->stats().in_use_nbytes);
  states_[id].sent_at = submit([this, id, &unit, nbytes, record] {
    bring_states(id);
    const auto copy = [&unit] { unit.main().send(); };
    states_[id].arrived = link_->carry(/*to_host=*/false, nbytes, copy, record);
  });
}

bool Offload::take_sent(UnitId id) {
  return states_.empty() || std::exchange(states_[id].sent, false);
}

void Offload::mark_forked() {
  static_cast<void>(worker_.release());
  if (context_.disk != nullptr) {
    context_.disk->mark_forked();
  }
}

// -- waits ----------------------------------------------------------------------------------

void Offload::wait(StepWorker::Ticket ticket) {
  if (worker_ != nullptr && ticket > 0) {
    worker_->wait(ticket);
  }
}

void Offload::wait_weights(UnitId id) {
  if (states_.empty() || states_[id].sent_at == 0) {
    return;
  }
  wait(std::exchange(states_[id].sent_at, 0));
  wait_arrival(id);
  for (const StreamRole role : {StreamRole::AllGather, StreamRole::Compute}) {
    context_.streams->order(role, StreamRole::HostToDevice);
  }
}

void Offload::check() {
  if (states_.empty() || worker_ == nullptr) {
    return;
  }
  auto error = worker_->take_error();
  error = error != nullptr ? error : std::exchange(arrival_error_, nullptr);
  if (error == nullptr && context_.tiers.parameters == Tier::Disk) {
    error = context_.disk->loads().take_failure();
  }
  if (error != nullptr) {
    std::rethrow_exception(error);
  }
}

// What the disk has failed to do is lost: nobody gets to see what is there instead.
void Offload::finish(StepWorker::Ticket ticket) {
  wait(ticket);
  wait_arrivals();
  check();
  if (context_.disk != nullptr && worker_ != nullptr) {
    context_.disk->check();
  }
}

void Offload::wait_updates() {
  end_step();
  finish(last_update_);
  if (!states_.empty()) {
    context_.streams->order(StreamRole::Compute, StreamRole::HostToDevice);
  }
}

void Offload::synchronize() {
  end_step();
  finish(last_);
}

void Offload::wait_arrival(UnitId id) {
  if (states_[id].arrived.valid() && worker_ != nullptr) {
    try {
      std::exchange(states_[id].arrived, {}).get();
    } catch (...) {
      arrival_error_ = std::current_exception();
    }
  }
}

void Offload::wait_arrivals() {
  for (UnitId id = 0; id < static_cast<UnitId>(states_.size()); ++id) {
    wait_arrival(id);
  }
}

std::pair<int64_t, int64_t> Offload::host_nbytes() const {
  int64_t weights = 0;
  for (const auto& unit : units_) {
    const bool has_shard = context_.tiers.parameters == Tier::Host;
    const int64_t shard = has_shard ? unit->layout().of_shard(context_.shard).nbytes() : 0;
    weights += unit->main().host_nbytes() + shard;
  }
  int64_t gradients = 0;
  for (const OffloadedUnit& state : states_) {
    gradients += state.landing ? state.landing->nbytes() : 0;
  }
  return {weights, gradients};
}

} // namespace zerocore
