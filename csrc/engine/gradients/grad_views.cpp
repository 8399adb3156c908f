#include "engine/gradients/grad_views.h"

#include <memory>
#include <utility>

#include "engine/graph/autograd.h"
#include "memory/bucket.h"

namespace zerocore {

namespace {

// The values of a gradient that a program keeps, and their old memory, whose address a NumPy array
// has.
struct KeptValues {
  c10::Storage values;
  c10::DataPtr before;
};

} // namespace

const at::Tensor& own_gradient(const UnitParam& param) {
  static const at::Tensor none;
  return param.is_whole && !param.moved_grad ? none : gradient_of(param.full);
}

void move_seen_grad(UnitParam& param) {
  if (param.is_whole && !std::exchange(param.moved_grad, true)) {
    param.shard.mutable_grad() = std::exchange(param.full.mutable_grad(), at::Tensor());
    move_accumulated_hooks(param.full, param.shard);
  }
}

void return_seen_grad(UnitParam& param) {
  if (std::exchange(param.moved_grad, false)) {
    param.full.mutable_grad() = std::exchange(param.shard.mutable_grad(), at::Tensor());
    move_accumulated_hooks(param.shard, param.full);
  }
}

GradViews::GradViews(const Units& units, const UnitContext& context, Reduction& reduction)
    : units_(units),
      context_(context),
      reduction_(reduction),
      apart_(units.size()),
      alone_(units.size()) {
  for (const auto& unit : units_) {
    params_.emplace_back(unit->params().size());
  }
}

void GradViews::take_changes(UnitId unit) {
  for (int i = 0; i < static_cast<int>(params_[unit].size()); ++i) {
    const at::Tensor& current = gradient_of(units_[unit]->params()[i].shard);
    Param& param = params_[unit][i];
    const at::Tensor& own = alone_[unit] && param.sums.defined() ? param.sums : param.grad;
    const bool is_seen = shows(param, current);
    if (param.seen.defined() && !is_seen) {
      let_go(param);
    }
    if (!current.defined() && context_.by_rows) {
      reduction_.set_valid(unit, i, false);
    } else if (!current.defined()) {
      reduction_.drop(unit, i);
      param.used = false;
    } else if (
        !is_seen && !current.is_same(own) && !current.is_same(grad(unit, i)) && own.defined()) {
      units_[unit]->memory().keep_grad(units_[unit]->layout().places()[i].region);
      own.copy_(current.layout() == at::kStrided ? current : current.to_dense());
      reduction_.set_valid(unit, i, true);
    }
  }
}

const at::Tensor& GradViews::seen(UnitId unit, int index) {
  Param& param = params_[unit][index];
  if (!units_[unit]->params()[index].is_whole) {
    return param.grad;
  }
  if (!param.seen.defined()) {
    param.seen = window_on(param.grad);
    param.window = param.seen.storage().getWeakStorageImpl();
  }
  return param.seen;
}

// `p.grad.data = t` keeps the tensor and changes its memory; `p.grad = p.grad.detach()` does the
// opposite.
bool GradViews::shows(const Param& param, const at::Tensor& current) {
  return param.seen.defined() && current.defined() && current.layout() == at::kStrided &&
      current.data_ptr() == param.grad.data_ptr() && current.sizes() == param.grad.sizes() &&
      current.strides() == param.grad.strides();
}

bool GradViews::is_set(UnitId unit, int param) const {
  const UnitParam& owner = units_[unit]->params()[param];
  const at::Tensor& current = gradient_of(owner.full);
  const bool is_set = owner.is_whole && !alone_[unit] && current.defined();
  return is_set && !shows(params_[unit][param], current);
}

bool GradViews::takes_values(const at::Tensor& current) {
  return current.layout() == at::kStrided && current.is_non_overlapping_and_dense();
}

void GradViews::let_go(Param& param) const {
  param.seen.reset();
  if (const auto storage = param.window->lock()) {
    const at::Tensor values = param.grad.clone();
    const auto kept = std::make_shared<KeptValues>(KeptValues{values.storage(), {}});
    kept->before = c10::Storage(storage).set_data_ptr(
        kept_memory(kept, values.mutable_data_ptr(), values.device()));
  }
}

void GradViews::set_apart(UnitId unit) {
  for (int i = 0; !apart_[unit] && i < static_cast<int>(params_[unit].size()); ++i) {
    if (reduction_.is_valid(unit, i)) {
      params_[unit][i].apart = grad(unit, i).clone();
      reduction_.set_valid(unit, i, false);
    }
  }
  apart_[unit] = true;
}

void GradViews::put_back(UnitId unit, bool adds) {
  for (int i = 0; apart_[unit] && i < static_cast<int>(params_[unit].size()); ++i) {
    const at::Tensor before = std::exchange(params_[unit][i].apart, {});
    if (!before.defined()) {
      continue;
    }
    if (adds && reduction_.is_valid(unit, i)) {
      grad(unit, i).add_(before);
    } else {
      grad(unit, i).copy_(before);
      reduction_.set_valid(unit, i, true);
    }
  }
  apart_[unit] = false;
}

void GradViews::note_used(UnitId unit) {
  for (size_t i = 0; i < params_[unit].size(); ++i) {
    params_[unit][i].used |= own_gradient(units_[unit]->params()[i]).defined();
  }
}

void GradViews::tell_used() {
  if (context_.control == nullptr) {
    return;
  }
  std::vector<bool> flags;
  for (const std::vector<Param>& params : params_) {
    for (const Param& param : params) {
      flags.push_back(param.used);
    }
  }
  context_.control->tell_used(flags);
}

void GradViews::hear_used(const std::vector<bool>& reduced) {
  if (context_.control == nullptr || !lacks_any(reduced)) {
    return;
  }
  const std::vector<bool> flags = context_.control->hear_used();
  auto used = flags.begin();
  for (size_t unit = 0; unit < params_.size(); ++unit) {
    for (Param& param : params_[unit]) {
      const bool by_any = *used++;
      param.used = param.used || (by_any && reduced[unit]);
    }
  }
}

// Returns whether this rank must ask the others which parameters of reduced units have a gradient.
bool GradViews::lacks_any(const std::vector<bool>& reduced) const {
  for (size_t unit = 0; unit < params_.size(); ++unit) {
    for (size_t i = 0; reduced[unit] && i < params_[unit].size(); ++i) {
      const UnitParam& owner = units_[unit]->params()[i];
      if (!params_[unit][i].used && owner.full.requires_grad() &&
          !gradient_of(owner.shard).defined()) {
        return true;
      }
    }
  }
  return false;
}

void GradViews::show(UnitId unit, bool reduced, bool alone) {
  alone_[unit] = alone;
  const bool held_back = !reduced && units_[unit]->context().mesh.shards_gradients;
  for (int i = 0; i < static_cast<int>(params_[unit].size()); ++i) {
    Param& param = params_[unit][i];
    UnitParam& owner = units_[unit]->params()[i];
    if (!param.grad.defined() || !owner.full.requires_grad()) {
      continue;
    }
    const bool had_grad = gradient_of(owner.shard).defined();
    const bool marked = param.used && !(held_back && context_.by_rows);
    const bool shown = had_grad || marked;
    reduction_.set_valid(unit, i, held_back ? had_grad && reduction_.is_valid(unit, i) : shown);
    if (!had_grad && shown && held_back) {
      param.grad.zero_(); // a mark, see Note [Sums that were not reduced]
    }
    const at::Tensor& view = alone && param.sums.defined() ? param.sums : seen(unit, i);
    const at::Tensor& current = gradient_of(owner.shard);
    if (owner.is_whole && had_grad && !shows(param, current) && takes_values(current)) {
      current.copy_(param.grad); // the program has set this tensor, and may hold it
    } else if (shown && !current.is_same(view)) {
      owner.shard.mutable_grad() = view;
    } else if (marked) {
      view.unsafeGetTensorImpl()->bump_version(); // the backward has added to it
    }
    param.used = param.used && !reduced;
  }
}

void GradViews::show_averages(UnitId unit) {
  alone_[unit] = false;
  for (size_t i = 0; i < params_[unit].size(); ++i) {
    const UnitParam& owner = units_[unit]->params()[i];
    const at::Tensor& sums = params_[unit][i].sums;
    if (sums.defined() && gradient_of(owner.shard).is_same(sums)) {
      owner.shard.mutable_grad() = params_[unit][i].grad;
    }
  }
}

void GradViews::forget_used() {
  for (std::vector<Param>& params : params_) {
    for (Param& param : params) {
      param.used = false;
    }
  }
}

} // namespace zerocore
