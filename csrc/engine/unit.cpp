// One unit and its states.
#include "engine/unit.h"

#include <algorithm>
#include <utility>

namespace zerocore {

std::vector<ParamSpec> specs_of(const std::vector<UnitParam>& params) {
  std::vector<ParamSpec> result;
  result.reserve(params.size());
  for (const UnitParam& param : params) {
    result.push_back(param.spec);
  }
  return result;
}

Unit::Unit(UnitId id, std::string name, std::vector<UnitParam> params, const UnitContext& context)
    : id_(id),
      name_(std::move(name)),
      params_(std::move(params)),
      context_(context),
      layout_(Layout::build(specs_of(params_), context.num_shards)),
      bucket_(
          layout_,
          layout_.all_regions(),
          context.shard,
          context.streams->device(),
          "unit '" + name_ + "'",
          /*hides=*/context.policy.shards_parameters()),
      changes_(params_.size(), 0),
      gathered_(layout_.regions().size(), -1) {
  if (context_.policy.shards_parameters()) {
    shards_.emplace(
        layout_.of_shard(context_.shard),
        layout_.all_regions(),
        0,
        context_.streams->device(),
        "unit '" + name_ + "'");
  }
  if (const std::vector<int> regions = layout_.main_regions(); !regions.empty()) {
    main_.emplace(
        layout_.of_shard(context_.shard).retyped(&Region::main),
        regions,
        0,
        context_.streams->device(),
        "unit '" + name_ + "'");
  }
}

at::Tensor Unit::make_full(int param) const {
  const ParamPlace& place = layout_.places().at(param);
  const UnitParam& full = params_[param];
  return bucket_.view(place.region, place.offset, full.spec.shape, full.strides);
}

at::Tensor Unit::make_shard(int param) const {
  const int region = layout_.places().at(param).region;
  if (!has_main(region)) {
    return model_part(param);
  }
  const int64_t numel = layout_.owned(param, context_.shard).size();
  return main_->view(region, layout_.offset_in_shard(param, context_.shard), {numel}, {1});
}

at::Tensor Unit::make_model_shard(int param) const {
  return has_main(layout_.places().at(param).region) ? model_part(param) : at::Tensor();
}

void Unit::bind(int index, at::Tensor full, at::Tensor shard) {
  UnitParam& param = params_.at(index);
  param.full = std::move(full);
  param.shard = std::move(shard);
  param.home = param.shard.storage().unsafeGetStorageImpl();
}

at::Tensor Unit::model_part(int param) const {
  const int region = layout_.places().at(param).region;
  const int64_t offset = layout_.offset_in_shard(param, context_.shard);
  const int64_t numel = layout_.owned(param, context_.shard).size();
  if (shards_) {
    return shards_->view(region, offset, {numel}, {1});
  }
  const int64_t begin = layout_.regions()[region].shard_range(context_.shard).begin;
  return bucket_.view(region, begin + offset, {numel}, {1});
}

const at::Tensor& Unit::model_shard(int region) const {
  return shards_ ? shards_->full(region) : bucket_.own(region);
}

const at::Tensor& Unit::updated_shard(int region) const {
  return has_main(region) ? main_->full(region) : model_shard(region);
}

// The last one first: on a stream it is behind the others, so one wait is enough.
void Unit::wait_for_all(std::vector<PendingCollective>& collectives) const {
  for (auto pending = collectives.rbegin(); pending != collectives.rend(); ++pending) {
    pending->wait(*context_.streams);
  }
  collectives.clear();
}

void Unit::set_state(UnitState next) {
  const bool legal = (state_ == UnitState::Sharded && next == UnitState::Unsharding) ||
      (state_ == UnitState::Unsharding && next == UnitState::Unsharded) ||
      (state_ == UnitState::Unsharded && next != UnitState::Unsharded);
  TORCH_INTERNAL_ASSERT(
      legal, "unit ", name_, ": ", static_cast<int>(state_), " > ", static_cast<int>(next));
  state_ = next;
}

void Unit::unshard() {
  // At stages 1 and 2 a unit with stale parameters is gathered again in place; a rank that
  // skipped it may not have waited for the last gather yet.
  wait_for_unshard();
  // This rank may be in a call that the others have left: they gather the unit anew, it goes on.
  const bool in_use = shards_ && state_ != UnitState::Sharded;
  if (in_use) {
    context_.streams->order(StreamRole::AllGather, StreamRole::Compute);
  } else if (shards_) {
    slot_ = context_.pool->acquire(
        {id_, BlockUse::Parameters}, bucket_.nbytes(), StreamRole::AllGather);
    bucket_.attach(slot_.data);
    context_.trace->add(
        TraceOp::Unshard, id_, bucket_.nbytes(), context_.pool->stats().in_use_nbytes);
  }
  set_state(UnitState::Unsharding);
  gathered_version_ = version();
  for (const int region : bucket_.regions()) {
    if (shards_ || !is_gathered(region)) {
      gather(region);
      gathered_[region] = region_version(region);
    }
  }
  if (in_use) {
    wait_for_unshard();
  }
}

void Unit::gather(int region) {
  const at::Tensor& own = shards_ ? shards_->full_bytes(region) : bucket_.own_bytes(region);
  const at::Tensor& full = bucket_.full_bytes(region);
  const int64_t nbytes = context_.collectives->methods().gather.wire_nbytes(full.numel());
  gathers_.push_back(context_.collectives->all_gather(full, own, tag(TraceOp::AllGather, nbytes)));
}

void Unit::wait_for_unshard() {
  if (state_ != UnitState::Unsharding) {
    return;
  }
  wait_for_all(gathers_);
  bucket_.show();
  set_state(UnitState::Unsharded);
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
  set_state(UnitState::Sharded);
  bucket_.detach();
  context_.pool->release(slot_);
  context_.trace->add(
      TraceOp::Reshard, id_, bucket_.nbytes(), context_.pool->stats().in_use_nbytes);
}

void Unit::mark_changed() {
  for (int64_t& changes : changes_) {
    ++changes;
  }
}

void Unit::mark_updated() {
  for (size_t param = 0; param < params_.size(); ++param) {
    changes_[param] += params_[param].shard.requires_grad() ? 1 : 0;
  }
}

void Unit::mark_updated(const std::vector<int>& params) {
  for (const int param : params) {
    ++changes_.at(param);
  }
}

void Unit::mark_fresh() {
  gathered_version_ = version();
  Snapshot& oldest = snapshots_[next_snapshot_];
  next_snapshot_ = (next_snapshot_ + 1) % snapshots_.size();
  oldest.unit = gathered_version_;
  oldest.params.resize(params_.size());
  for (size_t param = 0; param < params_.size(); ++param) {
    oldest.params[param] = param_version(static_cast<int>(param));
  }
}

std::optional<std::vector<int>> Unit::changed_since(int64_t version) const {
  for (const Snapshot& snapshot : snapshots_) {
    if (snapshot.unit == version && snapshot.params.size() == params_.size()) {
      std::vector<int> changed;
      for (size_t param = 0; param < params_.size(); ++param) {
        if (snapshot.params[param] != param_version(static_cast<int>(param))) {
          changed.push_back(static_cast<int>(param));
        }
      }
      return changed;
    }
  }
  return std::nullopt;
}

bool Unit::take_writes() {
  int64_t version = 0;
  for (const UnitParam& param : params_) {
    version += param.full.unsafeGetTensorImpl()->version_counter().current_version();
  }
  return std::exchange(full_version_, version) != version;
}

const UnitParam* Unit::find_moved() const {
  const auto moved = std::find_if(params_.begin(), params_.end(), [](const UnitParam& param) {
    return param.shard.storage().unsafeGetStorageImpl() != param.home;
  });
  return moved == params_.end() ? nullptr : &*moved;
}

void Unit::mark_gathered() {
  for (const int region : bucket_.regions()) {
    gathered_[region] = region_version(region);
  }
}

bool Unit::is_gathered() const {
  const std::vector<int>& regions = bucket_.regions();
  return std::all_of(
      regions.begin(), regions.end(), [&](int region) { return is_gathered(region); });
}

int64_t Unit::region_version(int region) const {
  int64_t version = 0;
  for (const int param : layout_.regions()[region].params) {
    version += param_version(param);
  }
  return version;
}

int64_t Unit::param_version(int param) const {
  const auto* shard = params_[param].shard.unsafeGetTensorImpl();
  return changes_[param] + static_cast<int64_t>(shard->version_counter().current_version());
}

int64_t Unit::version() const {
  int64_t version = 0;
  for (const int region : bucket_.regions()) {
    version += region_version(region);
  }
  return version;
}

int64_t Unit::persistent_nbytes() const {
  return shards_ ? shards_->nbytes() : bucket_.nbytes();
}

} // namespace zerocore
