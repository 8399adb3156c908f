// Shows gradients in `.grad` of the parameters.
#include "engine/shown_gradients.h"

#include "engine/autograd.h"

namespace zerocore {

GradientVersion GradientVersion::of(const at::Tensor& grad) {
  if (!grad.defined() || grad.numel() == 0) {
    return {};
  }
  const auto version = grad.unsafeGetTensorImpl()->version_counter().current_version();
  return {grad.const_data_ptr(), version};
}

ShownGradients::ShownGradients(
    const std::vector<std::unique_ptr<Unit>>& units,
    const UnitContext& context,
    Reduction& reduction,
    bool agree_on_used)
    : units_(units), context_(context), reduction_(reduction), agree_on_used_(agree_on_used) {
  for (const auto& unit : units_) {
    params_.emplace_back(unit->params().size());
  }
}

void ShownGradients::take_changes(UnitId unit, std::vector<GradientMemory>& memory) {
  for (int i = 0; i < static_cast<int>(params_[unit].size()); ++i) {
    const at::Tensor& current = gradient_of(units_[unit]->params()[i].shard);
    const at::Tensor& own = grad(unit, i);
    if (!current.defined() && context_.by_rows) {
      reduction_.set_valid(unit, i, false);
    } else if (!current.defined()) {
      reduction_.drop(unit, i);
    } else if (!current.is_same(own) && own.defined()) {
      memory[units_[unit]->layout().places()[i].region].keep();
      own.copy_(current);
      reduction_.set_valid(unit, i, true);
    }
  }
}

void ShownGradients::note_used(UnitId unit) {
  for (size_t i = 0; i < params_[unit].size(); ++i) {
    params_[unit][i].used |= gradient_of(units_[unit]->params()[i].full).defined();
  }
}

void ShownGradients::agree(const std::vector<bool>& reduced) {
  if (context_.collectives == nullptr || (has_agreed_ && !agree_on_used_)) {
    return;
  }
  std::vector<bool> flags;
  bool any_unused = false;
  for (size_t unit = 0; unit < params_.size(); ++unit) {
    for (size_t i = 0; i < params_[unit].size(); ++i) {
      const bool used = params_[unit][i].used;
      flags.push_back(used);
      any_unused =
          any_unused || (reduced[unit] && !used && units_[unit]->params()[i].full.requires_grad());
    }
  }
  flags.push_back(any_unused);
  flags = context_.any_rank(flags);
  auto used = flags.begin();
  for (std::vector<Param>& params : params_) {
    for (Param& param : params) {
      param.used = *used++;
    }
  }
  has_agreed_ = true;
  agree_on_used_ = agree_on_used_ || *used;
}

void ShownGradients::show(UnitId unit, bool reduced) {
  // Ranks that did not ask each other take every parameter of a reduced unit as used by some.
  const bool assume_used = !agree_on_used_ && context_.collectives != nullptr;
  const bool held_back = !reduced && context_.policy.shards_gradients();
  for (int i = 0; i < static_cast<int>(params_[unit].size()); ++i) {
    Param& param = params_[unit][i];
    UnitParam& owner = units_[unit]->params()[i];
    if (!param.grad.defined() || !owner.full.requires_grad()) {
      continue;
    }
    const bool had_grad = gradient_of(owner.shard).defined();
    const bool marked = param.used && !(held_back && context_.by_rows);
    const bool shown = had_grad || marked || (reduced && assume_used);
    reduction_.set_valid(unit, i, held_back ? had_grad && reduction_.is_valid(unit, i) : shown);
    if (!had_grad && shown && held_back) {
      param.grad.zero_(); // only a mark that zero_grad() can remove
    }
    if (shown && !gradient_of(owner.shard).is_same(param.grad)) {
      owner.shard.mutable_grad() = param.grad;
    }
    param.used = param.used && !reduced;
  }
}

void ShownGradients::forget_used() {
  for (std::vector<Param>& params : params_) {
    for (Param& param : params) {
      param.used = false;
    }
  }
}

} // namespace zerocore
