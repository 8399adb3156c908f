// Unsharding, resharding and versions; unit_values.cpp fills, reads and writes parameters.
#include "engine/unit/unit.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "engine/unit/offloaded_states.h"

namespace zerocore {

Unit::Unit(UnitId id, UnitSpec spec, const UnitContext& context)
    : id_(id),
      name_(std::move(spec.name)),
      params_(std::move(spec.params)),
      context_(context),
      layout_(context.mesh.layout_of(specs_of(params_), context.by_rows)),
      memory_(id, name_, layout_, context_),
      bucket_(memory_.full()),
      shards_(memory_.shards()),
      main_(layout_, context_, name_),
      unsharding_(id, context_.mesh, context_.tiers, !context_.streams->has_streams(), layout_),
      runner_(*this, memory_),
      settings_{1.0 / static_cast<double>(context.mesh.divisor), /*syncs=*/true, spec.stays},
      versions_(params_, layout_),
      gathered_(layout_.regions().size(), -1) {
  for (const int region : layout_.gathered_regions()) {
    main_.set_model(region, model_shard(region));
  }
}

at::Tensor Unit::make_full(int param) const {
  const ParamPlace& place = layout_.places().at(param);
  const UnitParam& full = params_[param];
  return counted(bucket_.view(place.region, place.offset, full.spec.shape, full.strides));
}

std::vector<int64_t> Unit::shard_sizes(int param) const {
  const int64_t numel = layout_.owned(param, context_.mesh.shard()).size();
  return context_.by_rows ? params_[param].spec.rows_of(numel) : std::vector<int64_t>{numel};
}

at::Tensor Unit::make_shard(int param) const {
  const int region = layout_.places().at(param).region;
  const int64_t offset = layout_.offset_in_shard(param, context_.mesh.shard());
  const auto sizes = shard_sizes(param);
  return counted(main_.has(region) ? main_.view(region, offset, sizes) : model_part(param));
}

at::Tensor Unit::make_model_shard(int param) const {
  const int region = layout_.places().at(param).region;
  const int64_t offset = layout_.offset_in_shard(param, context_.mesh.shard());
  if (context_.tiers.returns_weights()) {
    return main_.written_view(region, offset, shard_sizes(param));
  }
  return main_.has(region) && bucket_.has(region) ? model_part(param) : at::Tensor();
}

void Unit::bind(int index, at::Tensor full, at::Tensor shard, at::Tensor local) {
  UnitParam& param = params_.at(index);
  param.full = std::move(full);
  param.shard = std::move(shard);
  param.local = std::move(local);
  param.full_writes = data_counter(param.full);
  param.shard_writes = data_counter(memory_of(param));
  param.home = memory_of(param).storage().unsafeGetStorageImpl();
  param.full_home = param.full.storage().unsafeGetStorageImpl();
  param.trained = param.full.requires_grad();
}

at::Tensor Unit::model_part(int param) const {
  const int region = layout_.places().at(param).region;
  const int64_t offset = layout_.offset_in_shard(param, context_.mesh.shard());
  if (shards_) {
    return shards_->view(region, offset, shard_sizes(param));
  }
  const int64_t begin = layout_.regions()[region].shard_range(context_.mesh.shard()).begin;
  return bucket_.view(region, begin + offset, shard_sizes(param));
}

const at::Tensor& Unit::model_shard(int region) const {
  return shards_ ? shards_->full(region) : bucket_.own(region);
}

const at::Tensor& Unit::updated_shard(int region) const {
  return main_.has(region) ? main_.full(region) : model_shard(region);
}

void Unit::unshard() {
  std::vector<int> regions = bucket_.regions();
  if (!shards_) {
    std::erase_if(regions, [&](int region) { return is_gathered(region); });
  }
  // This rank may be in a call that other ranks have ended, and gather again for their next one.
  const bool in_use = shards_ && state() != ShardedState::Sharded;
  wait_for_unshard();
  std::vector<int> written = in_use ? versions_.written() : std::vector<int>();
  const at::Tensor own = written.empty() ? written_full_ : bucket_.bytes().clone();
  written.insert(written.end(), written_params_.begin(), written_params_.end());
  gathered_version_ = version();
  shards_version_ = versions_.of_shards();
  begin_gathers(regions);
  mark_gathered();
  if (in_use || own.defined()) {
    wait_for_unshard();
  }
  if (own.defined()) { // other ranks may not have written yet; see Note [Writes in a forward]
    const Bucket from = over(own);
    for (const int param : written) {
      part_of(bucket_, param).copy_(part_of(from, param));
    }
  }
}

void Unit::note_use() const {
  for (const int region : bucket_.regions()) {
    context_.streams->note_read(StreamRole::Compute, bucket_.full(region), "computes", name_);
  }
}

void Unit::note_change() const {
  for (const int region : bucket_.regions()) {
    context_.streams->note_write(StreamRole::Compute, updated_shard(region), "is updated", name_);
  }
}

void Unit::reshard() {
  wait_for_unshard();
  note_use();
  unsharding_.reshard(runner_);
}

void Unit::begin_gathers(const std::vector<int>& regions) {
  RECORD_USER_SCOPE("zerocore::all_gather (" + name_ + ")"); // evaluated only under a profiler
  runner_.forget_launch(); // a failed all-gather may have left unlaunched collectives
  const bool again = std::exchange(begun_version_, gathered_version_) == gathered_version_;
  unsharding_.begin(regions, again, runner_);
  runner_.launch();
}

void Unit::set_keeps_near(bool keeps) {
  unsharding_.set_keeps_near(keeps);
  if (!keeps) {
    runner_.drop_near();
  }
}

void Unit::mark_taken() {
  written_ = false;
  if (!has_saved_write()) {
    written_params_.clear(); // the writes are already in the shards
  }
  gathered_version_ = version();
  shards_version_ = versions_.of_shards();
}

bool Unit::cast_shard_changes() {
  const int64_t version = versions_.of_shards();
  if (std::exchange(shards_version_, version) == version) {
    return false;
  }
  cast_changes();
  return true;
}

bool Unit::mark_fresh() {
  mark_taken();
  return versions_.tell_autograd();
}

void Unit::mark_gathered() {
  for (const int region : bucket_.regions()) {
    gathered_[region] = versions_.of_region(region);
  }
  versions_.forget_updates();
}

bool Unit::is_gathered() const {
  return std::ranges::all_of(bucket_.regions(), [&](int region) { return is_gathered(region); });
}

bool Unit::holds_values(int param) const {
  const int region = layout_.places().at(param).region;
  const bool stays = !shards_ && bucket_.attached() && !layout_.regions()[region].has_main();
  return stays && !written_ && state() != ShardedState::Unsharding && is_gathered(region);
}

int64_t Unit::persistent_nbytes() const {
  const int64_t near = memory_.has_near() ? context_.mesh.near_nbytes(layout_.nbytes()) : 0;
  return near + (context_.tiers.has_host_parameters() ? 0 : kept().nbytes());
}

c10::DataPtr UnitContext::memory_of(Tier tier, UnitId unit, Memory part, const Bucket& bucket)
    const {
  switch (tier) {
    case Tier::Host:
      return host->memory(unit, part);
    case Tier::Disk:
      return disk->memory(unit, part);
    case Tier::Device:
      break;
  }
  return memory_for(bucket.bytes());
}

Units make_units(std::vector<UnitSpec> specs, const std::vector<UnitContext>& contexts) {
  Units units;
  for (UnitSpec& spec : specs) {
    UnitContext own = contexts.at(spec.mesh);
    if (!spec.near) {
      own.mesh = own.mesh.without_near();
    }
    const auto id = static_cast<UnitId>(units.size());
    units.push_back(std::make_unique<Unit>(id, std::move(spec), own));
    const bool is_gathered = own.mesh.shards_optimizer;
    if (own.registered != nullptr && is_gathered && !own.tiers.has_host_parameters()) {
      own.registered->reserve(Window::Parameters, units.back()->kept().bytes());
    }
  }
  return units;
}

std::vector<Collectives*> collectives_of(const Units& units) {
  std::vector<Collectives*> found;
  for (const auto& unit : units) {
    const UnitContext& context = unit->context();
    for (Collectives* each : {context.collectives, context.replicas, context.near}) {
      if (each != nullptr && std::ranges::find(found, each) == found.end()) {
        found.push_back(each);
      }
    }
  }
  return found;
}

} // namespace zerocore
