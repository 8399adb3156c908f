// One unit and its states.
#include "engine/unit.h"

#include <algorithm>
#include <utility>

namespace zerocore {

namespace {

using Calls = std::vector<CollectiveCall>;

bool is_legal(UnitState from, UnitState to) {
  return (from == UnitState::Sharded && to == UnitState::Unsharding) ||
      (from == UnitState::Unsharding && to == UnitState::Unsharded) ||
      (from == UnitState::Unsharded && to != UnitState::Unsharded);
}

bool is_joint(const UnitContext& context, size_t num_regions) {
  return num_regions > 1 && context.num_shards > 1 && context.collectives->launches_together();
}

// On the stream of gathers: what the host holds.
void load(
    const at::Tensor& to,
    const at::Tensor& from,
    const UnitContext& context,
    const std::string& name) {
  const auto guard = context.streams->use(StreamRole::AllGather);
  to.copy_(from, /*non_blocking=*/true);
  context.streams->note_write(StreamRole::AllGather, to, "loads", name);
}

// With others in `together`, if that is given; else at once.
PendingCollective start_gather(
    Collectives& collectives,
    const at::Tensor& full,
    const at::Tensor& own,
    CollectiveTag tag,
    Calls* together) {
  if (together == nullptr) {
    return collectives.all_gather(full, own, std::move(tag));
  }
  together->push_back({full, own, std::move(tag)});
  return {};
}

} // namespace

Unit::Unit(UnitId id, UnitSpec spec, const UnitContext& context)
    : id_(id),
      name_(std::move(spec.name)),
      params_(std::move(spec.params)),
      context_(context),
      layout_(Layout::build(specs_of(params_), context.num_shards, context.by_rows)),
      bucket_(
          layout_,
          layout_.all_regions(),
          context.shard,
          context.streams->device(),
          "unit '" + name_ + "'",
          /*hides=*/context.policy.shards_parameters()),
      main_(layout_, context_, name_),
      settings_{1.0 / static_cast<double>(context.world_size())},
      versions_(params_, layout_),
      gathered_(layout_.regions().size(), -1) {
  if (context_.policy.shards_parameters()) {
    shards_.emplace(
        layout_.of_shard(context_.shard),
        layout_.all_regions(),
        0,
        context_.device_of(context_.tiers.parameters),
        "unit '" + name_ + "'");
  }
  if (layout_.copies_out()) {
    staging_.emplace(id_, layout_, context_.shard, context_.streams->device(), name_);
  }
  for (const int region : layout_.all_regions()) {
    main_.set_model(region, model_shard(region));
  }
}

at::Tensor Unit::make_full(int param) const {
  const ParamPlace& place = layout_.places().at(param);
  const UnitParam& full = params_[param];
  return bucket_.view(place.region, place.offset, full.spec.shape, full.strides);
}

std::vector<int64_t> Unit::shard_sizes(int param) const {
  const int64_t numel = layout_.owned(param, context_.shard).size();
  return context_.by_rows ? params_[param].spec.rows_of(numel) : std::vector<int64_t>{numel};
}

at::Tensor Unit::make_shard(int param) const {
  const int region = layout_.places().at(param).region;
  if (!main_.has(region)) {
    return model_part(param);
  }
  return main_.view(region, layout_.offset_in_shard(param, context_.shard), shard_sizes(param));
}

at::Tensor Unit::make_model_shard(int param) const {
  const int region = layout_.places().at(param).region;
  const int64_t offset = layout_.offset_in_shard(param, context_.shard);
  if (context_.tiers.returns_weights()) {
    return main_.written_view(region, offset, shard_sizes(param));
  }
  return main_.has(region) ? model_part(param) : at::Tensor();
}

void Unit::bind(int index, at::Tensor full, at::Tensor shard, at::Tensor local) {
  UnitParam& param = params_.at(index);
  param.full = std::move(full);
  param.shard = std::move(shard);
  param.local = std::move(local);
  param.home = memory_of(param).storage().unsafeGetStorageImpl();
}

at::Tensor Unit::model_part(int param) const {
  const int region = layout_.places().at(param).region;
  const int64_t offset = layout_.offset_in_shard(param, context_.shard);
  if (shards_) {
    return shards_->view(region, offset, shard_sizes(param));
  }
  const int64_t begin = layout_.regions()[region].shard_range(context_.shard).begin;
  return bucket_.view(region, begin + offset, shard_sizes(param));
}

const at::Tensor& Unit::model_shard(int region) const {
  return shards_ ? shards_->full(region) : bucket_.own(region);
}

const at::Tensor& Unit::updated_shard(int region) const {
  return main_.has(region) ? main_.full(region) : model_shard(region);
}

void Unit::set_state(UnitState next) {
  TORCH_INTERNAL_ASSERT(is_legal(state_, next), "unit ", name_, " has another state");
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
  } else if (shards_ && !staging_) {
    take_bucket(StreamRole::AllGather);
  }
  if (staging_) {
    staging_->take(*context_.pool);
  }
  if (shards_ && !in_use) {
    tag(TraceOp::Unshard, bucket_.nbytes());
  }
  set_state(UnitState::Unsharding);
  gathered_version_ = version();
  gather_regions();
  if (in_use) {
    wait_for_unshard();
  }
}

void Unit::gather_regions() {
  Calls together;
  const bool joins = is_joint(context_, bucket_.regions().size());
  for (const int region : bucket_.regions()) {
    if (shards_ || !is_gathered(region)) {
      gather(region, joins ? &together : nullptr);
      gathered_[region] = versions_.of_region(region);
    }
  }
  if (!together.empty()) {
    gathers_ = context_.collectives->start_together(TraceOp::AllGather, std::move(together));
  }
}

void Unit::take_bucket(StreamRole user) {
  slot_ = context_.pool->acquire({id_, BlockUse::Parameters}, bucket_.nbytes(), user);
  bucket_.attach(slot_.data);
}

void Unit::gather(int region, Calls* together) {
  if (context_.tiers.has_host_parameters()) {
    load(bucket_.own_bytes(region), shards_->full_bytes(region), context_, name_);
    tag(TraceOp::ToDevice, bucket_.own_bytes(region).numel());
  }
  if (context_.num_shards == 1) {
    return; // the host had all of it
  }
  const bool in_place = !shards_ || context_.tiers.has_host_parameters();
  const at::Tensor& own = in_place ? bucket_.own_bytes(region) : shards_->full_bytes(region);
  const at::Tensor& full = (staging_ ? staging_->bucket() : bucket_).full_bytes(region);
  const int64_t nbytes = context_.collectives->methods().gather.wire_nbytes(full.numel());
  gathers_.push_back(
      start_gather(*context_.collectives, full, own, tag(TraceOp::AllGather, nbytes), together));
}

void Unit::wait_for_unshard() {
  if (state_ != UnitState::Unsharding) {
    return;
  }
  wait_for_all(gathers_, *context_.streams);
  if (context_.num_shards == 1) {
    context_.streams->order(StreamRole::Compute, StreamRole::AllGather);
  }
  if (staging_) {
    if (!bucket_.attached()) {
      take_bucket(StreamRole::Compute);
    }
    staging_->copy_out(bucket_, *context_.streams, name_);
    staging_->give_back(*context_.pool);
  }
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

void Unit::mark_fresh() {
  gathered_version_ = version();
  versions_.remember();
}

void Unit::mark_gathered() {
  for (const int region : bucket_.regions()) {
    gathered_[region] = versions_.of_region(region);
  }
}

bool Unit::is_gathered() const {
  const std::vector<int>& regions = bucket_.regions();
  return std::all_of(
      regions.begin(), regions.end(), [&](int region) { return is_gathered(region); });
}

int64_t Unit::persistent_nbytes() const {
  return context_.tiers.has_host_parameters() ? 0 : shards_ ? shards_->nbytes() : bucket_.nbytes();
}

} // namespace zerocore
