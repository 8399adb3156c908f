// Values of a unit's parameters: filled, read, cast, written back. See Note [Main and model
// weights].
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "engine/unit/full_values.h"
#include "engine/unit/unit.h"

namespace zerocore {

namespace {

// Throws unless `given`, which the user has set as the parameter's data, can lie in `home`.
void check_data(const UnitParam& param, const at::Tensor& given, const at::Tensor& home) {
  TORCH_CHECK_VALUE(
      given.sizes() == home.sizes() && given.dtype() == home.dtype(),
      "parameter '",
      param.spec.fqn,
      "' is sharded: its data cannot become ",
      given.dtype(),
      " of shape ",
      given.sizes(),
      " from ",
      home.dtype(),
      " of shape ",
      home.sizes(),
      "; change it before zerocore.shard.");
}

} // namespace

void Unit::materialize(const std::vector<at::Tensor>& full, bool broadcast_full) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  allocate_persistent();
  wait_for_unshard();
  const FullValues values(*this);
  values.fill(full);
  for (Collectives* collectives : {context_.replicas, context_.collectives}) {
    if (broadcast_full && collectives != nullptr) {
      values.broadcast(*collectives);
    }
  }
  take(values.bucket());
  versions_.mark_changed();
}

void Unit::allocate_persistent() {
  main_.allocate(id_);
  if (shards_ && !shards_->attached()) {
    const Tier tier = context_.tiers.parameters;
    shards_->attach(context_.memory_of(tier, id_, StatePart::Parameters, *shards_));
  } else if (!shards_ && !bucket_.attached()) {
    bucket_.attach(context_.memory_for(bucket_.bytes()));
  }
}

void Unit::take(const Bucket& staging) {
  note_change();
  for (const int region : staging.regions()) {
    const at::Tensor own = staged_part(*this, staging, region);
    main_.fill(region, own);
    if (shards_ && shards_->has(region)) {
      shards_->full(region).copy_(own);
    } else if (!shards_) {
      context_.streams->note_write(StreamRole::Compute, bucket_.full(region), "is filled", name_);
      bucket_.full(region).copy_(staging.full(region));
    }
  }
}

std::vector<at::Tensor> Unit::full_values() const {
  TORCH_INTERNAL_ASSERT(!context_.by_rows, "shards of rows are tensors that gather themselves");
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  const FullValues values(*this);
  for (const int region : values.bucket().regions()) {
    values.bucket().own(region).copy_(updated_shard(region));
  }
  if (context_.mesh.num_shards() > 1) {
    values.gather();
  }
  return values.by_param();
}

void Unit::cast_main() {
  if (is_cast()) {
    return;
  }
  main_.cast();
  mark_cast();
}

void Unit::keep_write() {
  const c10::InferenceMode normal(false);
  written_full_ = bucket_.bytes().clone();
}

Bucket Unit::written() const {
  const c10::Device device = written_full_.device();
  Bucket full(layout_, bucket_.regions(), context_.mesh.shard(), device, "unit '" + name_ + "'");
  full.attach(written_full_.data_ptr());
  return full;
}

void Unit::finish_write() {
  wait_for_unshard();
  write_back(written());
}

std::vector<at::Tensor> Unit::written_values() const {
  const Bucket& full = keeps_write() ? written() : bucket_;
  std::vector<at::Tensor> values(params_.size());
  for (size_t param = 0; param < params_.size() && full.attached(); ++param) {
    const ParamPlace& place = layout_.places()[param];
    if (full.has(place.region)) {
      values[param] = full.full(place.region).narrow(0, place.offset, params_[param].spec.numel());
    }
  }
  return values;
}

bool Unit::take_back(bool keeps) {
  bool any = false;
  for (size_t param = 0; param < params_.size(); ++param) {
    at::Tensor& full = params_[param].full;
    if (full.storage().unsafeGetStorageImpl() == params_[param].full_home) {
      continue;
    }
    any = true;
    const at::Tensor home = make_full(static_cast<int>(param));
    const at::Tensor given = full.detach();
    full.set_data(home); // autograd is not told, as elsewhere
    if (keeps) {
      check_data(params_[param], given, home);
      home.copy_(given);
      versions_.mark_written(param);
    }
  }
  return any;
}

void Unit::write_back() {
  note_use();
  write_back(bucket_);
}

void Unit::write_back(const Bucket& full) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  note_change();
  for (const int region : full.regions()) {
    const at::Tensor own = own_part(*this, full, region);
    if (main_.has(region)) {
      main_.take_changes(region, own);
    }
    if (shards_) {
      shards_->full(region).copy_(own);
    }
  }
  written_full_.reset();
}

} // namespace zerocore
