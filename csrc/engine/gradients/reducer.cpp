// Carries out reductions of gradients with tensors and collectives.
#include "engine/gradients/reducer.h"

#include <ATen/core/functional.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "engine/graph/autograd.h"
#include "kernels/ops.h"

namespace zerocore {

Reducer::Reducer(
    const Units& units,
    const UnitContext& context,
    const ShardOptions& sharding,
    Offload& offload)
    : units_(units),
      context_(context),
      offload_(offload),
      reduction_(
          {sharding, !context.streams->has_streams()},
          c10::fmap(
              units,
              [](const auto& unit) { return ReducedUnit{&unit->layout(), unit->context().mesh}; })),
      shown_(units, context, reduction_),
      memory_(units.size()),
      touched_(units.size()),
      reduced_(units.size()),
      leaves_(units.size()) {
  for (const auto& unit : units_) {
    const auto num_regions = static_cast<int>(unit->layout().regions().size());
    in_flight_.emplace_back(num_regions);
    for (int region = 0; region < num_regions; ++region) {
      memory_[unit->id()].emplace_back(*unit, region);
    }
  }
}

at::Tensor Reducer::make_grad(UnitId id, int param) const {
  const Layout& layout = units_.at(id)->layout();
  const int region = layout.places().at(param).region;
  if (!c10::isFloatingType(static_cast<c10::ScalarType>(layout.regions()[region].dtype))) {
    return {};
  }
  return memory_[id][region].view(
      layout.offset_in_shard(param, units_[id]->context().mesh.shard()),
      units_[id]->shard_sizes(param));
}

at::Tensor Reducer::make_sums(UnitId id, int param) const {
  const Layout& layout = units_.at(id)->layout();
  const Range place = layout.places().at(param).range();
  const GradientMemory& memory = memory_[id][layout.places()[param].region];
  return units_[id]->context().mesh.shards_gradients
      ? make_grad(id, param)
      : memory.view_of_all(place.begin, {place.size()});
}

// -- a backward -----------------------------------------------------------------------------

void Reducer::reduce(UnitId id) {
  if (deferred_) {
    return;
  }
  RECORD_USER_SCOPE("zerocore::reduce (" + units_[id]->name() + ")"); // made for a profiler alone
  const at::NoGradGuard no_grad;
  const bool sync = sync_ && units_[id]->settings().syncs;
  take_changes(id);
  if (sync && units_[id]->settings().after_reduce) {
    shown_.set_apart(id);
  }
  leaves_[id] = sync;
  note_trainable(id);
  shown_.note_used(id);
  const bool is_reduced = reduction_.reduce(id, sync, *this);
  launches_.start_joint();
  clear_full_grads(id);
  reduced_[id] = reduced_[id] || is_reduced;
}

void Reducer::take_changes(UnitId id) {
  if (!touched_[id]) {
    offload_.recall(id);
    shown_.take_changes(id, memory_[id]);
    touched_[id] = true;
  }
}

bool Reducer::holds_back(UnitId id) const {
  return has_grads(id) || reduction_.has_local(id);
}

bool Reducer::holds_back_any() const {
  return std::ranges::any_of(units_, [this](const auto& unit) { return holds_back(unit->id()); });
}

bool Reducer::has_grads(UnitId id) const {
  return std::ranges::any_of(units_[id]->params(), [](const UnitParam& param) {
    return gradient_of(param.full).defined();
  });
}

// Users freeze and thaw parameters between steps.
void Reducer::note_trainable(UnitId id) {
  const Unit& unit = *units_[id];
  for (int region = 0; region < static_cast<int>(memory_[id].size()); ++region) {
    const auto& params = unit.layout().regions()[region].params;
    reduction_.set_trainable(id, region, std::any_of(params.begin(), params.end(), [&](int param) {
                               return unit.params()[param].full.requires_grad();
                             }));
  }
}

void Reducer::clear_full_grads(UnitId id) {
  for (UnitParam& param : units_[id]->params()) {
    if (gradient_of(param.full).defined()) {
      param.full.mutable_grad().reset();
    }
  }
}

std::vector<bool> Reducer::finish() {
  const at::NoGradGuard no_grad;
  const bool any_reduced = std::find(reduced_.begin(), reduced_.end(), true) != reduced_.end();
  if (any_reduced) {
    shown_.tell_used();
  }
  reduction_.finish(*this);
  if (any_reduced) {
    shown_.hear_used(reduced_);
  }
  for (UnitId id = 0; id < static_cast<UnitId>(units_.size()); ++id) {
    if (touched_[id]) {
      note_use(id);
      after_reduce(id);
      shown_.show(id, reduced_[id], !leaves_[id]);
      offload_.note_shown(id);
    } else if (sync_ && any_reduced && !reduction_.has_local(id)) {
      shown_.show_averages(id);
    }
  }
  std::vector<bool> reduced = reduced_;
  forget_backward();
  if (context_.by_rows && context_.lands_gradients()) {
    offload_.synchronize(); // nothing waits when a DTensor is read
  }
  return reduced;
}

// The program's own function gets the gradients of this backward alone.
void Reducer::after_reduce(UnitId id) {
  const auto& function = units_[id]->settings().after_reduce;
  if (!function || !reduced_[id]) {
    return;
  }
  for (const GradientMemory& memory : memory_[id]) {
    if (memory.is_kept()) {
      function(memory.own(Memory::Kept));
    }
  }
  shown_.put_back(id, /*adds=*/true);
}

void Reducer::reset() {
  launches_.forget();
  if (context_.lands_gradients()) { // blocks that are given back may be on their way to the host
    context_.streams->order(StreamRole::Compute, StreamRole::DeviceToHost);
  }
  reduction_.reset(*this);
  for (UnitId id = 0; id < static_cast<UnitId>(units_.size()); ++id) {
    clear_full_grads(id);
    shown_.put_back(id, /*adds=*/false);
  }
  shown_.forget_used();
  forget_backward();
}

void Reducer::forget_backward() {
  std::fill(touched_.begin(), touched_.end(), false);
  std::fill(reduced_.begin(), reduced_.end(), false);
}

int64_t Reducer::persistent_nbytes() const {
  int64_t nbytes = 0;
  for (const std::vector<GradientMemory>& unit : memory_) {
    for (const GradientMemory& memory : unit) {
      nbytes += memory.kept_nbytes();
    }
  }
  return nbytes;
}

std::vector<at::Tensor> Reducer::device_memory(UnitId unit) const {
  std::vector<at::Tensor> found;
  for (const GradientMemory& memory : memory_.at(unit)) {
    if (memory.kept_nbytes() > 0 && memory.bytes().device() == context_.streams->device()) {
      found.push_back(memory.bytes());
    }
  }
  return found;
}

// -- steps ----------------------------------------------------------------------------------

void Reducer::run(const GradStep& step) {
  GradientMemory& memory = memory_[step.unit][step.region];
  switch (step.kind) {
    case GradStepKind::Keep:
      return memory.keep();
    case GradStepKind::Take:
      return memory.take(step, *context_.pool);
    case GradStepKind::GiveBack:
      return memory.give_back(step, *context_.pool);
    case GradStepKind::Pack:
      return packer_.pack(*units_[step.unit], step, reduction_, memory.whole(step.to));
    case GradStepKind::Cast:
      return cast(step, memory);
    case GradStepKind::Order:
      return context_.streams->order(StreamRole::ReduceScatter, StreamRole::Compute);
    case GradStepKind::Start:
      return start_within(step, memory);
    case GradStepKind::StartAcross:
      return start_across(step, memory);
    case GradStepKind::Wait: {
      RECORD_USER_SCOPE("zerocore::wait_reduce (" + units_[step.unit]->name() + ")");
      return in_flight_[step.unit][step.region].within.wait(*context_.streams);
    }
    case GradStepKind::WaitAcross:
      return in_flight_[step.unit][step.region].across.wait(*context_.streams);
    case GradStepKind::Zero:
      shown_.grad(step.unit, step.param).zero_();
      return;
    case GradStepKind::Sum:
      return sum(step, memory);
    case GradStepKind::OffloadGrad:
      return offload_.offload_grad(
          step.unit, memory.own(step.from), memory.own(Memory::Kept), step.adds);
    case GradStepKind::GradReady:
      if (leaves_[step.unit]) {
        offload_.grad_ready(step.unit, step.region, memory.own(Memory::Kept));
      }
      return;
  }
}

void Reducer::cast(const GradStep& step, const GradientMemory& memory) const {
  const std::string& name = units_[step.unit]->name();
  const at::Tensor& from = memory.whole(step.from);
  const at::Tensor& to = memory.whole(step.to);
  context_.streams->note_read(StreamRole::Compute, from, "casts", name);
  context_.streams->note_write(StreamRole::Compute, to, "casts", name);
  kernels::pack(to, {{&from, 0, 0, from.numel()}}, scale_of(step, *units_[step.unit]));
}

void Reducer::start_within(const GradStep& step, const GradientMemory& memory) {
  const at::Tensor& sent = memory.whole(step.from);
  const at::Tensor& to =
      step.op == TraceOp::AllReduce ? sent : memory.received(step.to, step.parts);
  PendingCollective& pending = in_flight_[step.unit][step.region].within;
  const Unit& unit = *units_[step.unit];
  launches_.start(unit, step, *unit.context().collectives, to, sent, pending);
}

void Reducer::start_across(const GradStep& step, const GradientMemory& memory) {
  if (step.op == TraceOp::GatherSums) {
    return gather_sums(step, memory);
  }
  const at::Tensor& to = memory.own(step.to);
  const at::Tensor from = memory.summed(step.from, to.numel());
  PendingCollective& pending = in_flight_[step.unit][step.region].across;
  const Unit& unit = *units_[step.unit];
  launches_.start(unit, step, *unit.context().replicas, to, from, pending);
}

void Reducer::gather_sums(const GradStep& step, const GradientMemory& memory) {
  const Unit& unit = *units_[step.unit];
  const UnitContext& context = unit.context();
  const bool is_whole = step.axis == AxisName::State;
  const Region& region = unit.layout().regions()[step.region];
  const int64_t numel = region.numel() / (is_whole ? 1 : context.mesh.state.size);
  const at::Tensor to = memory.summed(step.to, numel);
  const at::Tensor own = memory.summed(step.to, numel / context.mesh.axis(step.axis).size);
  Collectives& collectives = is_whole ? *context.collectives : *context.replicas;
  context_.streams->order(collectives.reducing(), StreamRole::ReduceScatter);
  in_flight_[step.unit][step.region].across =
      collectives.gather_sums(to, own, unit.tag(step.op, step.nbytes));
}

void Reducer::sum(const GradStep& step, const GradientMemory& memory) {
  const std::string& name = units_[step.unit]->name();
  const at::Tensor& from = memory.received(step.from, step.parts);
  const at::Tensor to = memory.summed(step.to, from.numel() / step.parts);
  context_.streams->note_read(StreamRole::Compute, from, "sums", name);
  context_.streams->note_write(StreamRole::Compute, to, "sums", name);
  kernels::accumulate(to, from, step.parts, step.adds, scale_of(step, *units_[step.unit]));
}

// The optimizer may read and write the gradients from here on.
void Reducer::note_use(UnitId id) const {
  for (const GradientMemory& memory : memory_[id]) {
    if (memory.is_kept() && !context_.lands_gradients()) {
      context_.streams->note_write(
          StreamRole::Compute, memory.own(Memory::Kept), "gives gradients", units_[id]->name());
    }
  }
}

} // namespace zerocore
