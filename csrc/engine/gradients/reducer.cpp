#include "engine/gradients/reducer.h"

#include <ATen/core/functional.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <algorithm>

#include "engine/graph/autograd.h"

namespace zerocore {

namespace {

// Returns the parameter's gradient, or null. Throws if it cannot be packed.
const at::Tensor* checked_gradient(const UnitParam& param) {
  const at::Tensor& grad = own_gradient(param);
  if (!grad.defined()) {
    return nullptr;
  }
  TORCH_CHECK_VALUE(
      grad.layout() == at::kStrided && grad.dtype() == param.full.dtype() &&
          !grad.unsafeGetTensorImpl()->is_python_dispatch(),
      "parameter '",
      param.spec.fqn,
      "': its gradient has layout ",
      grad.layout(),
      " and dtype ",
      grad.dtype(),
      ", or is a tensor subclass; expected a plain dense tensor of dtype ",
      param.full.dtype(),
      ".");
  return &grad;
}

// Autograd lays a gradient out in memory as its parameter. A pipeline's schedule, which sets the
// gradient itself, may not. A sparse gradient becomes a dense one, and a conjugated view a copy.
void lay_out(UnitParam& param) {
  const at::Tensor& grad = own_gradient(param);
  if (!grad.defined()) {
    return;
  }
  if (grad.layout() == at::kSparse || grad.is_conj()) {
    param.full.mutable_grad() =
        grad.layout() == at::kSparse ? grad.to_dense() : grad.resolve_conj();
  } else if (
      grad.layout() == at::kStrided &&
      !torch::autograd::utils::obeys_layout_contract(grad, param.full)) {
    param.full.mutable_grad() = torch::autograd::utils::clone_obey_contract(grad, param.full);
  }
}

} // namespace

void GradientPacker::pack(
    const Unit& unit,
    const Step& step,
    const Reduction& reduction,
    const at::Tensor& bucket) {
  segments_.clear();
  if (unit.layout().by_rows()) {
    add_rows(unit, step, reduction);
  } else {
    add_params(unit, step, reduction);
  }
  unit.context().streams->note_write(StreamRole::Compute, bucket, "packs", unit.name());
  kernels::pack(bucket, segments_, scale_of(step, unit));
}

void GradientPacker::add_params(const Unit& unit, const Step& step, const Reduction& reduction) {
  const Region& region = unit.layout().regions()[step.region];
  int64_t end = 0;
  for (const int i : region.params) {
    const Range place = unit.layout().places()[i].range();
    add_segment(nullptr, 0, {end, place.begin}, false);
    add_param(unit.params()[i], place, reduction.added(step, i));
    end = place.end;
  }
  add_segment(nullptr, 0, {end, region.numel()}, false);
}

// Packs rows in rank order, see Note [Shards of rows]. The step adds to all elements of a parameter
// or to none.
void GradientPacker::add_rows(const Unit& unit, const Step& step, const Reduction& reduction) {
  const Layout& layout = unit.layout();
  const auto add = [this](const at::Tensor* source, const WireRuns& runs, bool adds) {
    segments_.push_back({source, 0, runs.begin, runs.numel, adds, {runs.run, runs.stride}});
  };
  for (const int i : layout.regions()[step.region].params) {
    const bool adds = !reduction.added(step, i).empty();
    add(checked_gradient(unit.params()[i]), layout.wire_runs(i), adds);
  }
  for (const WireRuns& gap : layout.wire_gaps(step.region)) {
    add(nullptr, gap, false);
  }
}

void GradientPacker::add_param(const UnitParam& param, const Range& place, const Range& added) {
  const at::Tensor* grad = checked_gradient(param);
  add_segment(grad, place.begin, {place.begin, added.begin}, false);
  add_segment(grad, place.begin, added, true);
  add_segment(grad, place.begin, {added.end, place.end}, false);
}

// `start` is the offset of the source's first element in the region.
void GradientPacker::add_segment(
    const at::Tensor* source,
    int64_t start,
    const Range& range,
    bool add) {
  if (!range.empty() && (source != nullptr || !add)) {
    segments_.push_back({source, range.begin - start, range.begin, range.size(), add});
  }
}

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
      views_(units, context, reduction_),
      touched_(units.size()),
      reduced_(units.size()) {}

at::Tensor Reducer::make_grad(UnitId id, int param) const {
  const Layout& layout = units_.at(id)->layout();
  const int region = layout.places().at(param).region;
  const auto dtype = static_cast<c10::ScalarType>(layout.regions()[region].dtype);
  if (!c10::isFloatingType(dtype) && !c10::isComplexType(dtype)) {
    return {};
  }
  return units_[id]->memory().grad_view(
      region,
      layout.offset_in_shard(param, units_[id]->context().mesh.shard()),
      units_[id]->shard_sizes(param));
}

at::Tensor Reducer::make_sums(UnitId id, int param) const {
  const Layout& layout = units_.at(id)->layout();
  const ParamPlace& place = layout.places().at(param);
  return units_[id]->context().mesh.shards_gradients
      ? make_grad(id, param)
      : units_[id]->memory().sums_view(place.region, place.offset, {place.numel});
}

// -- a backward -----------------------------------------------------------------------------

void Reducer::reduce(UnitId id) {
  if (deferred_) {
    return;
  }
  RECORD_USER_SCOPE("zerocore::reduce (" + units_[id]->name() + ")"); // for profilers
  const at::NoGradGuard no_grad;
  const bool sync = sync_ && units_[id]->settings().syncs;
  touch(id);
  if (sync && units_[id]->settings().after_reduce) {
    views_.set_apart(id);
  }
  note_trainable(id);
  std::ranges::for_each(units_[id]->params(), lay_out);
  views_.note_used(id);
  const Unit& unit = *units_[id];
  const double average = 1.0 / static_cast<double>(unit.context().mesh.divisor);
  const bool averages = unit.has_whole() && unit.settings().gradient_scale == average;
  const bool is_reduced = reduction_.reduce(id, sync, *this, averages);
  units_[id]->runner().launch();
  clear_full_grads(id);
  reduced_[id] = reduced_[id] || is_reduced;
}

void Reducer::touch(UnitId id) {
  if (!touched_[id]) {
    offload_.recall(id);
    std::ranges::for_each(units_[id]->params(), move_seen_grad);
    views_.take_changes(id);
    touched_[id] = true;
  }
}

bool Reducer::holds_back(UnitId id) const {
  return has_grads(id) || reduction_.has_local(id);
}

bool Reducer::has_earlier_sums(UnitId id) const {
  return sync_ && units_[id]->settings().syncs && reduction_.has_local(id);
}

bool Reducer::holds_back_any() const {
  return std::ranges::any_of(units_, [this](const auto& unit) { return holds_back(unit->id()); });
}

bool Reducer::has_grads(UnitId id) const {
  return std::ranges::any_of(
      units_[id]->params(), [](const UnitParam& param) { return own_gradient(param).defined(); });
}

bool Reducer::has_more_to_sum(UnitId id) const {
  const Unit& unit = *units_[id];
  return !unit.settings().syncs && reduction_.holds(id, /*sync=*/false) &&
      std::ranges::any_of(
          unit.layout().regions(),
          [](const Region& region) { return region.grad != region.own(); }) &&
      has_grads(id);
}

// Users may freeze and unfreeze parameters between steps.
void Reducer::note_trainable(UnitId id) {
  const Unit& unit = *units_[id];
  for (int region = 0; region < static_cast<int>(unit.layout().regions().size()); ++region) {
    const auto& params = unit.layout().regions()[region].params;
    reduction_.set_trainable(id, region, std::any_of(params.begin(), params.end(), [&](int param) {
                               return unit.params()[param].full.requires_grad();
                             }));
  }
}

void Reducer::clear_full_grads(UnitId id) {
  for (UnitParam& param : units_[id]->params()) {
    if (own_gradient(param).defined()) {
      param.full.mutable_grad().reset();
    }
  }
}

void Reducer::move_seen_grads() {
  for (const auto& unit : units_) {
    std::ranges::for_each(unit->params(), move_seen_grad);
  }
}

void Reducer::release_kept() {
  const at::NoGradGuard no_grad;
  move_seen_grads();
  for (const auto& unit : units_) {
    if (unit->has_whole()) {
      views_.take_changes(unit->id());
    }
  }
  return_seen_grads();
}

// A pipeline's schedule adds to `grad` itself until its end.
void Reducer::return_seen_grads() {
  for (const auto& unit : units_) {
    if (!deferred_) {
      std::ranges::for_each(unit->params(), return_seen_grad);
    }
  }
}

std::vector<bool> Reducer::finish() {
  const at::NoGradGuard no_grad;
  const bool any_reduced = std::find(reduced_.begin(), reduced_.end(), true) != reduced_.end();
  if (any_reduced) {
    views_.tell_used();
  }
  reduction_.finish(*this);
  if (any_reduced) {
    views_.hear_used(reduced_);
  }
  for (UnitId id = 0; id < static_cast<UnitId>(units_.size()); ++id) {
    if (touched_[id]) {
      note_use(id);
      after_reduce(id);
      views_.show(id, reduced_[id], !reduction_.is_final(id));
      offload_.note_shown(id);
    } else if (sync_ && any_reduced && !reduction_.has_local(id)) {
      views_.show_averages(id);
    }
  }
  return_seen_grads();
  std::vector<bool> reduced = reduced_;
  forget_backward();
  if (context_.by_rows && context_.lands_gradients()) {
    offload_.synchronize(); // a read of a DTensor does not wait for the copy
  }
  return reduced;
}

// The user's function sees only the gradients of this backward.
void Reducer::after_reduce(UnitId id) {
  const auto& function = units_[id]->settings().after_reduce;
  if (!function || !reduced_[id]) {
    return;
  }
  for (const at::Tensor& kept : units_[id]->memory().kept_grads()) {
    function(kept);
  }
  views_.put_back(id, /*adds=*/true);
}

void Reducer::reset() {
  for (const auto& unit : units_) {
    unit->runner().forget_launch();
  }
  if (context_.lands_gradients()) { // copies to the host may still read blocks that reset() frees
    context_.streams->order(StreamRole::Compute, StreamRole::DeviceToHost);
  }
  reduction_.reset(*this);
  for (UnitId id = 0; id < static_cast<UnitId>(units_.size()); ++id) {
    clear_full_grads(id);
    views_.put_back(id, /*adds=*/false);
  }
  return_seen_grads();
  views_.forget_used();
  forget_backward();
}

void Reducer::forget_backward() {
  std::fill(touched_.begin(), touched_.end(), false);
  std::fill(reduced_.begin(), reduced_.end(), false);
}

int64_t Reducer::persistent_nbytes() const {
  int64_t nbytes = 0;
  for (const auto& unit : units_) {
    for (const at::Tensor& bytes : unit->memory().grad_bytes()) {
      nbytes += bytes.numel();
    }
  }
  return nbytes;
}

std::vector<at::Tensor> Reducer::device_memory(UnitId unit) const {
  std::vector<at::Tensor> found = units_.at(unit)->memory().grad_bytes();
  std::erase_if(found, [this](const at::Tensor& bytes) {
    return bytes.device() != context_.streams->device() || bytes.numel() == 0;
  });
  return found;
}

// -- steps ----------------------------------------------------------------------------------

void Reducer::run(const Step& step) {
  UnitMemory& memory = units_[step.unit]->memory();
  if (step.kind == StepKind::Ready) {
    offload_.grad_ready(step.unit, step.region, memory.own(Memory::Kept, step.region));
  } else if (step.kind != StepKind::Move || !move(step, memory)) {
    units_[step.unit]->runner().run(step);
  }
}

// Returns false if the unit's StepRunner must carry out the step.
bool Reducer::move(const Step& step, UnitMemory& memory) {
  switch (step.how) {
    case How::Pack:
      packer_.pack(*units_[step.unit], step, reduction_, memory.whole(step.to, step.region));
      return true;
    case How::Zero:
      views_.grad(step.unit, step.param).zero_();
      return true;
    case How::Copy:
      offload_.offload_grad(
          step.unit,
          memory.own(step.from, step.region),
          memory.own(Memory::Kept, step.region),
          step.adds);
      return true;
    default:
      return false;
  }
}

// Tells the hand-over checker that the optimizer may write the gradients from now on.
void Reducer::note_use(UnitId id) const {
  if (context_.lands_gradients()) {
    return;
  }
  for (const at::Tensor& kept : units_[id]->memory().kept_grads()) {
    context_.streams->note_write(StreamRole::Compute, kept, "gives gradients", units_[id]->name());
  }
}

} // namespace zerocore
