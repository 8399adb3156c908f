// Values of a unit's parameters: filled, read, cast, written back. See Note [Main and model
// weights].
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "engine/unit.h"
#include "kernels/ops.h"
#include "runtime/device_memory.h"

namespace zerocore {

namespace {

void broadcast(
    const Bucket& staging,
    Collectives& collectives,
    const Streams& streams,
    const std::string& unit) {
  streams.order(StreamRole::AllGather, StreamRole::Compute);
  std::vector<PendingCollective> pending;
  for (const int region : staging.regions()) {
    pending.push_back(collectives.broadcast(staging.full_bytes(region), {&unit, nullptr}));
  }
  wait_for_all(pending, streams);
}

} // namespace

void Unit::materialize(const std::vector<at::Tensor>& full, bool broadcast_full) {
  TORCH_INTERNAL_ASSERT(!context_.by_rows, "shards of rows are filled by whoever binds them");
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  allocate_persistent();
  wait_for_unshard();
  const Bucket staging = make_staging();
  fill(staging, full);
  for (Collectives* collectives : {context_.replicas, context_.collectives}) {
    if (broadcast_full && collectives != nullptr) {
      broadcast(staging, *collectives, *context_.streams, name_);
    }
  }
  take(staging);
  versions_.mark_changed();
}

void Unit::allocate() {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  allocate_persistent();
  wait_for_unshard();
  for (const int region : bucket_.regions()) {
    if (has_main(region)) {
      main_->full(region).zero_();
    }
    model_shard(region).zero_();
  }
  versions_.mark_changed();
}

void Unit::allocate_persistent() {
  const c10::Device device = context_.streams->device();
  if (main_ && !main_->attached()) {
    main_->attach(allocate_memory(device, main_->nbytes()));
  }
  if (shards_ && !shards_->attached()) {
    shards_->attach(allocate_memory(device, shards_->nbytes()));
  } else if (!shards_ && !bucket_.attached()) {
    bucket_.attach(allocate_memory(device, bucket_.nbytes()));
    state_ = UnitState::Unsharded;
  }
}

// Full parameters before anything is rounded. From the allocator, not the pool: what is only
// needed once must not stay reserved.
Bucket Unit::make_staging() const {
  const c10::Device device = context_.streams->device();
  Bucket staging(
      layout_.retyped(&Region::main),
      bucket_.regions(),
      context_.shard,
      device,
      "unit '" + name_ + "'");
  staging.attach(allocate_memory(device, staging.nbytes()));
  return staging;
}

void Unit::fill(const Bucket& staging, const std::vector<at::Tensor>& full) const {
  for (const int region : staging.regions()) {
    staging.full(region).zero_();
    context_.streams->note_write(StreamRole::Compute, staging.full(region), "is filled", name_);
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    if (full.at(i).defined()) {
      const ParamPlace& place = layout_.places()[i];
      staging.view(place.region, place.offset, params_[i].spec.shape, params_[i].strides)
          .copy_(full[i]);
    }
  }
}

void Unit::take(const Bucket& staging) {
  note_change();
  for (const int region : staging.regions()) {
    if (has_main(region)) {
      main_->full(region).copy_(staging.own(region));
    }
    if (shards_) {
      shards_->full(region).copy_(staging.own(region));
    } else {
      context_.streams->note_write(StreamRole::Compute, bucket_.full(region), "is filled", name_);
      bucket_.full(region).copy_(staging.full(region));
    }
  }
}

std::vector<at::Tensor> Unit::full_values() const {
  TORCH_INTERNAL_ASSERT(!context_.by_rows, "shards of rows are tensors that gather themselves");
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  const Bucket staging = make_staging();
  context_.streams->order(StreamRole::AllGather, StreamRole::Compute);
  std::vector<PendingCollective> pending;
  for (const int region : staging.regions()) {
    if (context_.num_shards == 1) {
      staging.full(region).copy_(updated_shard(region));
    } else {
      const Bucket& own = has_main(region) ? *main_ : shards_ ? *shards_ : bucket_;
      const at::Tensor& full = staging.full_bytes(region);
      pending.push_back(context_.collectives->all_gather(
          full, own.own_bytes(region), tag(TraceOp::AllGather, full.numel())));
    }
  }
  wait_for_all(pending, *context_.streams);
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < params_.size(); ++i) {
    const ParamPlace& place = layout_.places()[i];
    values.push_back(
        staging.view(place.region, place.offset, params_[i].spec.shape, params_[i].strides));
  }
  return values;
}

void Unit::cast_main() {
  if (!main_ || cast_version_ == version()) {
    return;
  }
  for (const int region : main_->regions()) {
    context_.streams->note_read(StreamRole::Compute, main_->full(region), "is cast", name_);
    context_.streams->note_write(StreamRole::Compute, model_shard(region), "is cast", name_);
    kernels::cast(model_shard(region), {main_->full(region)}, {0});
  }
  mark_cast();
}

// This rank's rows of the unsharded parameters, as they lie in its shard.
at::Tensor Unit::own_rows(int region) const {
  const at::Tensor rows = at::zeros_like(model_shard(region));
  for (const int param : layout_.regions()[region].params) {
    const ParamPlace& place = layout_.places()[param];
    const Range own = layout_.owned(param, context_.shard);
    rows.narrow(0, place.shard_offset, own.size())
        .copy_(bucket_.full(region).narrow(0, place.offset + own.begin, own.size()));
  }
  return rows;
}

void Unit::write_back() {
  note_use();
  note_change();
  for (const int region : bucket_.regions()) {
    const at::Tensor own = context_.by_rows ? own_rows(region) : bucket_.own(region);
    if (has_main(region)) {
      const at::Tensor& main = main_->full(region);
      main.copy_(at::where(main.to(own.scalar_type()).eq(own), main, own.to(main.scalar_type())));
    }
    if (shards_) {
      shards_->full(region).copy_(own);
    }
  }
  versions_.mark_changed();
}

} // namespace zerocore
