// Fills, reads, casts and writes back the values of a unit's parameters. See Note [Main and model
// weights].
#include "engine/unit/unit_values.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/math.h"
#include "engine/unit/unit.h"

namespace zerocore {

FullValues::FullValues(const Unit& unit)
    : unit_(unit),
      streams_(*unit.context().streams),
      bucket_(
          unit.layout().retyped(&Region::main),
          unit.layout().kept_regions(),
          unit.context().mesh.shard(),
          streams_.device(),
          "unit '" + unit.name() + "'") {
  bucket_.attach(allocate_memory(streams_.device(), bucket_.nbytes()));
}

void FullValues::fill(const std::vector<at::Tensor>& values) const {
  for (const int region : bucket_.regions()) {
    bucket_.full(region).zero_();
    streams_.note_write(StreamRole::Compute, bucket_.full(region), "is filled", unit_.name());
  }
  const std::vector<at::Tensor> views = by_param();
  for (size_t i = 0; i < views.size(); ++i) {
    if (values.at(i).defined()) {
      views[i].copy_(values[i]);
    }
  }
}

void FullValues::broadcast(Collectives& collectives) const {
  streams_.order(StreamRole::AllGather, StreamRole::Compute);
  std::vector<PendingCollective> pending;
  for (const int region : bucket_.regions()) {
    pending.push_back(collectives.broadcast(bucket_.full_bytes(region), {&unit_.name(), nullptr}));
  }
  wait_for_all(pending, streams_);
}

void FullValues::gather() const {
  const UnitContext& context = unit_.context();
  // The replicas' parts of a shard come first, see Note [Sharded across].
  const Axis whole, &state = context.mesh.state;
  std::vector<std::pair<Collectives*, Axis>> levels = {{context.collectives, whole}};
  if (context.mesh.shards_across) {
    levels.insert(levels.begin(), {context.replicas, state});
  }
  streams_.order(StreamRole::AllGather, StreamRole::Compute);
  for (const auto& [collectives, axis] : levels) {
    std::vector<PendingCollective> pending;
    for (const int region : bucket_.regions()) {
      const at::Tensor to = bucket_.full_bytes(region).chunk(axis.size)[axis.rank];
      const at::Tensor own = to.chunk(collectives->size())[collectives->rank()];
      const CollectiveTag tag = unit_.tag(TraceOp::AllGather, to.numel());
      pending.push_back(collectives->start(TraceOp::AllGather, {to, own, tag}));
    }
    wait_for_all(pending, streams_);
  }
  // A unit with fsdp_pre_all_gather is laid out by rows, whatever the model's option.
  const Layout& layout = unit_.layout();
  for (const int region : layout.by_rows() ? bucket_.regions() : std::vector<int>()) {
    const at::Tensor wire = bucket_.full(region).clone();
    kernels::copy_pieces(bucket_.full(region), wire, row_pieces(layout, region));
  }
}

std::vector<at::Tensor> FullValues::by_param() const {
  std::vector<at::Tensor> views;
  for (const UnitParam& param : unit_.params()) {
    const ParamPlace& place = unit_.layout().places()[views.size()];
    views.push_back(bucket_.view(place.region, place.offset, param.spec.shape, param.strides));
  }
  return views;
}

namespace {

at::Tensor rows_of(const Unit& unit, const Bucket& full, int region) {
  const Layout& layout = unit.layout();
  const at::Tensor rows = at::zeros_like(full.own(region));
  for (const int param : layout.regions()[region].params) {
    const ParamPlace& place = layout.places()[param];
    const Range own = layout.owned(param, unit.context().mesh.shard());
    rows.narrow(0, place.shard_offset, own.size())
        .copy_(full.full(region).narrow(0, place.offset + own.begin, own.size()));
  }
  return rows;
}

at::Tensor on_its_way(const at::Tensor& shard, at::ScalarType format) {
  const auto bytes = shard.options().dtype(at::kByte);
  const at::Tensor blocks = at::empty({scaled_nbytes(shard.numel())}, bytes);
  const at::Tensor gathered = at::empty_like(shard);
  kernels::encode(blocks, shard, format);
  kernels::decode(gathered, blocks, {{0, 0, shard.numel()}}, format);
  return gathered;
}

} // namespace

std::vector<kernels::Piece> row_pieces(const Layout& layout, int region) {
  std::vector<kernels::Piece> pieces;
  for (const int param : layout.regions()[region].params) {
    const auto [from, numel, run, stride] = layout.wire_runs(param);
    pieces.push_back({from, layout.places()[param].offset, numel, {run, stride}});
  }
  return pieces;
}

at::Tensor staged_part(const Unit& unit, const Bucket& full, int region) {
  return unit.layout().by_rows() ? rows_of(unit, full, region) : full.own(region);
}

at::Tensor own_part(const Unit& unit, const Bucket& full, int region) {
  const at::Tensor part = staged_part(unit, full, region);
  const Region& types = unit.layout().regions()[region];
  if (!types.is_encoded()) {
    return part;
  }
  const at::Tensor& exact = unit.kept().full(region);
  const auto format = static_cast<at::ScalarType>(types.gather.dtype);
  return at::where(part.eq(on_its_way(exact, format)), exact, part);
}

namespace {

// Throws unless `given`, the data that the user has set for the parameter, fits into `home`.
void check_data(const UnitParam& param, const at::Tensor& given, at::IntArrayRef shape) {
  const at::ScalarType dtype = param.shard.scalar_type();
  TORCH_CHECK_VALUE(
      given.sizes() == shape && given.scalar_type() == dtype,
      "parameter '",
      param.spec.fqn,
      "' is sharded, so its dtype and shape are fixed. Expected ",
      dtype,
      " of shape ",
      shape,
      ", got ",
      given.dtype(),
      " of shape ",
      given.sizes(),
      ". Change it before zerocore.shard.");
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
  for (size_t i = 0; i < params_.size(); ++i) {
    const UnitParam& param = params_[i];
    if (has_moved(i)) {
      const ParamPlace& place = layout_.places()[i];
      param.full.detach().copy_(
          staging.view(place.region, place.offset, param.spec.shape, param.strides));
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
  const std::vector<at::Tensor> found = values.by_param();
  for (size_t param = 0; param < params_.size(); ++param) {
    if (has_moved(param)) {
      found[param].copy_(params_[param].full);
    }
  }
  return found;
}

void Unit::follow_whole() {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); ++i) {
    UnitParam& param = params_[i];
    const at::Tensor& full = param.full;
    if (!param.is_whole ||
        (full.const_data_ptr() == param.shard.const_data_ptr() &&
         full.sizes() == param.spec.shape && full.strides() == param.strides &&
         full.dtype() == param.shard.dtype())) {
      continue;
    }
    const at::Tensor given = param.full.detach();
    check_data(param, given, param.spec.shape);
    if (given.strides() != param.strides) {
      param.full.set_data(at::empty_strided(given.sizes(), param.strides, given.options()));
      param.full.copy_(given);
    }
    const at::Tensor home = param.full.detach();
    param.shard.set_data(home.as_strided({home.numel()}, {1}));
    versions_.mark_written(i);
  }
}

bool Unit::has_moved(size_t index) const {
  const UnitParam& param = params_[index];
  const ParamPlace& place = layout_.places()[index];
  const auto home = [&] {
    return bucket_.view(place.region, place.offset, param.spec.shape, param.strides);
  };
  return param.is_whole && param.full.const_data_ptr() != home().const_data_ptr();
}

void Unit::cast_main() {
  if (is_cast()) {
    return;
  }
  main_.cast();
  mark_cast();
}

void Unit::save_write() {
  const c10::InferenceMode normal(false);
  written_full_ = bucket_.bytes().clone();
}

Bucket Unit::over(const at::Tensor& bytes) const {
  const c10::Device device = bytes.device();
  Bucket full(layout_, bucket_.regions(), context_.mesh.shard(), device, "unit '" + name_ + "'");
  full.attach(bytes.data_ptr());
  return full;
}

// Returns the parameter's elements, 1-D; undefined if the parameter is not gathered.
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
  const Bucket& full = has_saved_write() ? over(written_full_) : bucket_;
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
    const bool is_at_home = full.storage().unsafeGetStorageImpl() == params_[param].full_home;
    if (params_[param].is_whole || is_at_home) {
      continue;
    }
    found.push_back(static_cast<int>(param));
    const at::Tensor home = make_full(static_cast<int>(param));
    const at::Tensor given = full.detach();
    full.set_data(home); // bumps no version of autograd
    if (keeps) {
      check_data(params_[param], given, home.sizes());
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
