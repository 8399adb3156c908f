// A step whose states lie on the host.
#include "engine/offload.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "engine/autograd.h"
#include "runtime/device_memory.h"

namespace zerocore {

Offload::Offload(
    const std::vector<std::unique_ptr<Unit>>& units,
    const UnitContext& context,
    int num_threads)
    : units_(units), context_(context), worker_(std::make_unique<StepWorker>(num_threads)) {
  if (!context.tiers.has_host_states()) {
    return;
  }
  for (const auto& unit : units) {
    const Layout& layout = unit->layout();
    OffloadedUnit& state = states_.emplace_back(ArrivedSquares(layout, context.shard));
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

StepWorker::Ticket Offload::submit(std::shared_ptr<OpenRecord> record, StepWorker::Work work) {
  return submit([record = std::move(record), work = std::move(work)] {
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
    square(id, region, kept);
  } else if (state.landing->has(region)) {
    make_landing(state);
    land(id, region, kept);
    state.left[region] = true;
    square(id, region, state.landing->full(region));
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
  state.left_at = submit(context_.note(TraceOp::ToHost, id, nbytes), [copied] {
    if (copied->event) {
      copied->event->synchronize();
    }
  });
}

StepWorker::Ticket Offload::bring(UnitId id, int64_t nbytes, StepWorker::Work copy) {
  const auto record = context_.note(TraceOp::ToHost, id, nbytes);
  if (context_.host_link == nullptr) {
    return submit(record, std::move(copy));
  }
  HostLink::Transfer transfer{/*to_host=*/true, nbytes, std::move(copy), record};
  const auto arrived = transfer.arrival->future();
  context_.host_link->carry(std::move(transfer));
  return submit([arrived] { arrived.get(); });
}

// Behind the arrival.
void Offload::square(UnitId id, int region, const at::Tensor& host) {
  if (!takes_squares_ || context_.streams->has_streams()) {
    return;
  }
  OffloadedUnit& state = states_[id];
  const auto nbytes = static_cast<int64_t>(host.nbytes());
  state.squares_record = context_.note(TraceOp::HostSquares, id, nbytes);
  state.left_at = submit(state.squares_record, state.squares.take(region, host));
}

at::Tensor Offload::known_squares(UnitId id, int param) {
  if (states_.empty()) {
    return {};
  }
  takes_squares_ = true;
  OffloadedUnit& state = states_.at(id);
  const Unit& unit = *units_[id];
  const at::Tensor& grad = gradient_of(unit.params()[param].shard);
  const bool is_known = state.squares.has(unit.layout().places().at(param).region);
  if (!is_known || GradientVersion::of(grad) != state.shown[param]) {
    return {};
  }
  wait(state.left_at, state.squares_record);
  return state.squares.of(param);
}

void Offload::recall(UnitId id) {
  if (!states_.empty()) {
    OffloadedUnit& state = states_[id];
    wait(std::max(state.left_at, state.updated_at));
    context_.streams->order(StreamRole::Compute, StreamRole::DeviceToHost);
    state.left.assign(state.left.size(), false);
    state.squares.forget();
  }
}

void Offload::note_shown(UnitId id) {
  if (states_.empty()) {
    return;
  }
  const auto& params = units_[id]->params();
  for (size_t i = 0; i < params.size(); ++i) {
    states_[id].shown[i] = GradientVersion::of(gradient_of(params[i].shard));
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
  if (host.numel() > 0 &&
      (!state.left[region] || GradientVersion::of(grad) != state.shown[param])) {
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
  OffloadedUnit& state = states_[held->unit];
  state.record = context_.note(TraceOp::HostUpdate, held->unit, nbytes);
  last_update_ = submit(state.record, [held, step = std::move(step)] {
    step.run();
    for (const auto& [to, from] : held->casts) {
      to.copy_(from);
    }
  });
  state.updated_at = last_update_;
}

void Offload::send(UnitId id) {
  OffloadedUnit& state = states_.at(id);
  state.sent = true;
  state.arrival = std::make_shared<Arrival>();
  const auto arrival = state.arrival;
  if (!context_.tiers.returns_weights()) { // gathers load them from the host
    state.sent_at = submit([arrival] { arrival->set(nullptr); });
    return;
  }
  const Unit& unit = *units_[id];
  unit.main().order_send();
  const int64_t nbytes = unit.main().sent_nbytes();
  const auto record = state.record = context_.note(TraceOp::ToDevice, id, nbytes);
  if (HostLink* link = context_.host_link; link != nullptr) {
    // The worker goes on with the next unit meanwhile.
    state.sent_at = submit([link, &unit, nbytes, record, arrival] {
      link->carry({false, nbytes, [&unit] { unit.main().send(); }, record, {}, arrival});
    });
  } else {
    state.sent_at = submit(record, [&unit, arrival] {
      const auto told = c10::make_scope_exit([&] { arrival->set(nullptr); });
      unit.main().send();
    });
  }
  state.updated_at = last_update_ = state.sent_at;
}

bool Offload::take_sent(UnitId id) {
  return states_.empty() || std::exchange(states_[id].sent, false);
}

// -- waits ----------------------------------------------------------------------------------

void Offload::wait(StepWorker::Ticket ticket, const std::shared_ptr<OpenRecord>& record) {
  const int64_t begin = now_ns();
  if (worker_ != nullptr && ticket > 0) {
    worker_->wait(ticket);
  }
  if (record != nullptr) {
    record->wait_ns += now_ns() - begin;
  }
}

void Offload::wait_weights(UnitId id) {
  if (states_.empty() || states_[id].sent_at == 0) {
    return;
  }
  OffloadedUnit& state = states_[id];
  const int64_t begin = now_ns();
  wait(std::exchange(state.sent_at, 0));
  wait_arrival(id);
  if (const auto record = std::exchange(state.record, nullptr)) {
    record->wait_ns += now_ns() - begin;
  }
  for (const StreamRole role : {StreamRole::AllGather, StreamRole::Compute}) {
    context_.streams->order(role, StreamRole::HostToDevice);
  }
}

std::shared_future<void> Offload::before_gather(UnitId id) {
  if (states_.empty() || states_[id].sent_at == 0) {
    return {};
  }
  if (context_.collectives == nullptr || !context_.collectives->holds()) {
    wait_weights(id);
    return {};
  }
  const auto& arrival = states_[id].arrival; // none where all was waited for
  return arrival == nullptr ? std::shared_future<void>() : arrival->future();
}

void Offload::check() {
  if (states_.empty() || worker_ == nullptr) {
    return;
  }
  const auto error = worker_->take_error();
  if (const auto first = error != nullptr ? error : std::exchange(arrival_error_, nullptr)) {
    std::rethrow_exception(first);
  }
}

void Offload::begin_step() {
  wait_updates();
  takes_squares_ = false;
}

void Offload::wait_updates() {
  wait(last_update_);
  wait_arrivals();
  check();
  if (!states_.empty()) {
    context_.streams->order(StreamRole::Compute, StreamRole::HostToDevice);
  }
}

void Offload::synchronize() {
  wait(last_);
  wait_arrivals();
  check();
}

void Offload::wait_arrival(UnitId id) {
  if (states_[id].arrival != nullptr && worker_ != nullptr) {
    try {
      std::exchange(states_[id].arrival, nullptr)->future().get();
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
    const bool has_shard = context_.tiers.has_host_parameters();
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
