#include "engine/offload/gradient_offload.h"

#include "engine/graph/autograd.h"
#include "engine/offload/host_gradients.h"

namespace zerocore {

GradientOffload::GradientOffload(const Units& units, const UnitContext& context, StepWorker& worker)
    : units_(units), context_(context), worker_(worker) {
  for (const auto& unit : units) {
    const Layout& layout = unit->layout();
    const int64_t shard = unit->context().mesh.shard();
    LandingUnit& state = states_.emplace_back(ArrivedSquares(layout, shard));
    state.sent.resize(layout.regions().size());
    state.shown.resize(unit->params().size());
    const std::vector<int> regions = context.tiers.landing_regions(layout);
    if (!regions.empty()) {
      const Layout kept = layout.of_shard(shard).retyped(&Region::grad);
      const std::string owner = "the gradient of unit '" + unit->name() + "'";
      state.landing.emplace(kept, regions, 0, c10::kCPU, owner);
    }
  }
}

void GradientOffload::grad_ready(UnitId id, int region, const at::Tensor& kept) {
  LandingUnit& state = states_[id];
  if (!state.landing) {
    if (!context_.lands_gradients()) { // the CPU keeps it: no copy, but the trace counts one
      const auto record = context_.note(TraceOp::ToHost, id, static_cast<int64_t>(kept.nbytes()));
      state.sent_at = worker_.submit(record, [] {});
    }
    square(id, region, kept);
  } else if (state.landing->has(region)) {
    make_landing(id);
    offload_grad(id, region, kept);
    state.sent[region] = true;
    square(id, region, state.landing->full(region));
  }
}

// The first gradient allocates the memory.
void GradientOffload::make_landing(UnitId id) {
  Bucket& landing = *states_[id].landing;
  if (!landing.attached()) {
    landing.attach(context_.memory_of(Tier::Host, id, Memory::Kept, landing));
  }
}

// A device copies on a stream of its own; on the CPU the worker copies.
void GradientOffload::offload_grad(UnitId id, int region, const at::Tensor& kept) {
  LandingUnit& state = states_[id];
  const at::Tensor& host = state.landing->full(region);
  const auto nbytes = static_cast<int64_t>(kept.nbytes());
  if (!context_.streams->has_streams()) {
    const auto record = context_.note(TraceOp::ToHost, id, nbytes);
    state.sent_at = worker_.submit(record, [host, kept] { host.copy_(kept); });
    return;
  }
  const StreamEvent copied = copy_to_host(*units_[id], host, kept);
  const auto record = context_.note(TraceOp::ToHost, id, nbytes);
  state.sent_at = worker_.submit(record, [copied] { Streams::synchronize(copied); });
}

// Queues the squares after the copy. A device with streams computes them itself, unless the host
// keeps its gradients.
void GradientOffload::square(UnitId id, int region, const at::Tensor& host) {
  if (!takes_squares_ || (context_.streams->has_streams() && !context_.lands_gradients())) {
    return;
  }
  LandingUnit& state = states_[id];
  const auto nbytes = static_cast<int64_t>(host.nbytes());
  state.squares_record = context_.note(TraceOp::HostSquares, id, nbytes);
  state.sent_at = worker_.submit(state.squares_record, state.squares.take(region, host));
}

at::Tensor GradientOffload::known_squares(UnitId id, int param) {
  takes_squares_ = true;
  LandingUnit& state = states_.at(id);
  const Unit& unit = *units_[id];
  const at::Tensor& grad = gradient_of(unit.params()[param].shard);
  const bool is_known = state.squares.has(unit.layout().places().at(param).region);
  if (!is_known || as_shown(grad) != state.shown[param]) {
    return {};
  }
  worker_.wait(state.sent_at, state.squares_record);
  return state.squares.of(param);
}

at::Tensor GradientOffload::arrived(UnitId id, int param, const at::Tensor& grad) {
  at::Tensor host = landed(id, param, grad);
  worker_.wait(states_[id].sent_at);
  return host;
}

void GradientOffload::recall(UnitId id) {
  LandingUnit& state = states_[id];
  worker_.wait(state.sent_at);
  context_.streams->order(StreamRole::Compute, StreamRole::DeviceToHost);
  state.sent.assign(state.sent.size(), false);
  state.squares.forget();
}

GradientOffload::Shown GradientOffload::as_shown(const at::Tensor& grad) {
  if (!grad.defined() || grad.numel() == 0) {
    return {};
  }
  const auto version = grad.unsafeGetTensorImpl()->version_counter().current_version();
  return {grad.const_data_ptr(), version};
}

void GradientOffload::note_shown(UnitId id) {
  const auto& params = units_[id]->params();
  for (size_t i = 0; i < params.size(); ++i) {
    states_[id].shown[i] = as_shown(gradient_of(params[i].shard));
  }
}

at::Tensor GradientOffload::landed(UnitId id, int param, const at::Tensor& grad) {
  LandingUnit& state = states_[id];
  if (!state.landing) {
    return grad;
  }
  make_landing(id);
  const Unit& unit = *units_[id];
  const int region = unit.layout().places()[param].region;
  const int64_t begin = unit.layout().offset_in_shard(param, unit.context().mesh.shard());
  const at::Tensor host = state.landing->view(region, begin, unit.shard_sizes(param));
  if (host.numel() > 0 && (!state.sent[region] || as_shown(grad) != state.shown[param])) {
    worker_.wait(state.sent_at);
    host.copy_(grad);
  }
  return host;
}

} // namespace zerocore
