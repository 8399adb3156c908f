// Values of a unit's parameters: filled, read, cast, written back. See Note [Main and model
// weights].
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <numeric>
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
    memory_.shards()->attach(context_.memory_of(tier, id_, Memory::Shard, *shards_));
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

Bucket Unit::over(const at::Tensor& bytes) const {
  const c10::Device device = bytes.device();
  Bucket full(layout_, bucket_.regions(), context_.mesh.shard(), device, "unit '" + name_ + "'");
  full.attach(bytes.data_ptr());
  return full;
}

// 1-D; undefined where the parameter is not gathered.
at::Tensor Unit::part_of(const Bucket& full, int param) const {
  const ParamPlace& place = layout_.places()[param];
  return full.has(place.region)
      ? full.full(place.region).narrow(0, place.offset, params_[param].spec.numel())
      : at::Tensor();
}

void Unit::finish_write() {
  wait_for_unshard();
  write_back(over(written_full_));
}

bool Unit::take_writes() {
  std::vector<int> written = take_back(/*keeps=*/true);
  const std::vector<int> more = versions_.take_writes(/*keeps=*/true);
  written.insert(written.end(), more.begin(), more.end());
  for (const int param : written) {
    if (std::ranges::find(written_params_, param) == written_params_.end()) {
      written_params_.push_back(param);
    }
  }
  return !written.empty();
}

std::vector<at::Tensor> Unit::written_values() const {
  const Bucket& full = keeps_write() ? over(written_full_) : bucket_;
  std::vector<at::Tensor> values(params_.size());
  for (const int param : full.attached() ? written_params_ : std::vector<int>()) {
    values[param] = part_of(full, param);
  }
  return values;
}

std::vector<int> Unit::take_back(bool keeps) {
  std::vector<int> found;
  for (size_t param = 0; param < params_.size(); ++param) {
    at::Tensor& full = params_[param].full;
    if (full.storage().unsafeGetStorageImpl() == params_[param].full_home) {
      continue;
    }
    found.push_back(static_cast<int>(param));
    const at::Tensor home = make_full(static_cast<int>(param));
    const at::Tensor given = full.detach();
    full.set_data(home); // autograd is not told, as elsewhere
    if (keeps) {
      check_data(params_[param], given, home);
      home.copy_(given);
      versions_.mark_written(param);
    }
  }
  return found;
}

void Unit::write_back(bool all) {
  if (all) {
    written_params_.resize(params_.size());
    std::iota(written_params_.begin(), written_params_.end(), 0);
  }
  note_use();
  write_back(bucket_);
}

void Unit::write_back(const Bucket& full) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  note_change();
  for (const int region : full.regions()) {
    const at::Tensor own = own_part(*this, full, region);
    for (const int param : layout_.regions()[region].params) {
      if (std::ranges::find(written_params_, param) == written_params_.end()) {
        continue;
      }
      const int64_t size = layout_.owned(param, context_.mesh.shard()).size();
      const int64_t offset = layout_.offset_in_shard(param, context_.mesh.shard());
      const at::Tensor part = own.narrow(0, offset, size);
      if (main_.has(region)) {
        main_.copy_changed(region, offset, part);
      }
      if (shards_) {
        shards_->full(region).narrow(0, offset, size).copy_(part);
      }
    }
  }
  drop_writes();
}

} // namespace zerocore
