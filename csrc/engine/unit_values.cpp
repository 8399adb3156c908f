// Values of a unit's parameters: filled, read, cast, written back. See Note [Main and model
// weights].
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "engine/full_values.h"
#include "engine/unit.h"
#include "kernels/ops.h"
#include "runtime/device_memory.h"

namespace zerocore {

void Unit::materialize(const std::vector<at::Tensor>& full, bool broadcast_full) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  allocate_persistent();
  wait_for_unshard();
  const FullValues values(layout_, context_.shard, *context_.streams, name_);
  values.fill(params_, full);
  for (Collectives* collectives : {context_.replicas, context_.collectives}) {
    if (broadcast_full && collectives != nullptr) {
      values.broadcast(*collectives);
    }
  }
  take(values.bucket());
  versions_.mark_changed();
}

void Unit::allocate_persistent() {
  const c10::Device device = context_.streams->device();
  if (main_ && !main_->attached()) {
    main_->attach(allocate_memory(device_of(context_.tiers.states), main_->nbytes()));
  }
  if (shards_ && !shards_->attached()) {
    shards_->attach(allocate_memory(device_of(context_.tiers.parameters), shards_->nbytes()));
  } else if (!shards_ && !bucket_.attached()) {
    bucket_.attach(allocate_memory(device, bucket_.nbytes()));
    state_ = UnitState::Unsharded;
  }
  if (sent_ && !sent_->attached()) {
    sent_->attach(allocate_memory(c10::kCPU, sent_->nbytes()));
  }
}

void Unit::take(const Bucket& staging) {
  note_change();
  for (const int region : staging.regions()) {
    if (has_main(region)) {
      main_->full(region).copy_(staging.own(region));
    }
    if (sent_ && sent_->has(region)) {
      sent_->full(region).copy_(staging.own(region)); // an update may leave some of it alone
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
  const FullValues values(layout_, context_.shard, *context_.streams, name_);
  const Bucket& staging = values.bucket();
  const bool from_host = context_.tiers.has_host_states() || context_.tiers.has_host_parameters();
  for (const int region : staging.regions()) {
    if (from_host && context_.num_shards > 1) {
      staging.own(region).copy_(updated_shard(region));
    }
  }
  context_.streams->order(StreamRole::AllGather, StreamRole::Compute);
  std::vector<PendingCollective> pending;
  for (const int region : staging.regions()) {
    if (context_.num_shards == 1) {
      staging.full(region).copy_(updated_shard(region));
    } else {
      const Bucket& own = has_main(region) ? *main_ : shards_ ? *shards_ : bucket_;
      const at::Tensor& full = staging.full_bytes(region);
      pending.push_back(context_.collectives->all_gather(
          full,
          from_host ? staging.own_bytes(region) : own.own_bytes(region),
          tag(TraceOp::AllGather, full.numel())));
    }
  }
  wait_for_all(pending, *context_.streams);
  return values.of(params_);
}

void Unit::cast_main() {
  if (!main_ || cast_version_ == version()) {
    return;
  }
  for (const int region : main_->regions()) {
    if (!context_.tiers.returns_weights()) {
      context_.streams->note_read(StreamRole::Compute, main_->full(region), "is cast", name_);
      context_.streams->note_write(StreamRole::Compute, model_shard(region), "is cast", name_);
      kernels::cast(model_shard(region), {main_->full(region)}, {0});
    } else if (sent_ && sent_->has(region)) {
      kernels::cast(sent_->full(region), {main_->full(region)}, {0});
    }
  }
  if (context_.tiers.returns_weights()) {
    return_weights();
  }
  mark_cast();
}

void Unit::return_weights() const {
  order_send();
  send();
  context_.streams->order(StreamRole::Compute, StreamRole::HostToDevice);
}

bool Unit::is_updated_on_host(int param) const {
  return context_.tiers.has_host_states() &&
      layout_.regions()[layout_.places().at(param).region].requires_grad;
}

const at::Tensor& Unit::returned_shard(int region) const {
  return sent_ && sent_->has(region) ? sent_->full(region) : main_->full(region);
}

void Unit::order_send() const {
  context_.streams->order(StreamRole::HostToDevice, StreamRole::Compute);
  for (const int region : main_ ? main_->regions() : std::vector<int>()) {
    const at::Tensor& to = model_shard(region);
    context_.streams->note_write(StreamRole::HostToDevice, to, "is sent", name_);
  }
}

void Unit::send() const {
  const auto guard = context_.streams->use(StreamRole::HostToDevice);
  for (const int region : main_ ? main_->regions() : std::vector<int>()) {
    model_shard(region).copy_(returned_shard(region), /*non_blocking=*/true);
  }
}

int64_t Unit::sent_nbytes() const {
  int64_t nbytes = 0;
  for (const int region : main_ ? main_->regions() : std::vector<int>()) {
    nbytes += layout_.regions()[region].shard_nbytes();
  }
  return nbytes;
}

void Unit::write_back() {
  note_use();
  note_change();
  for (const int region : bucket_.regions()) {
    const at::Tensor own = own_part(layout_, bucket_, region, context_.shard);
    if (has_main(region)) {
      const at::Tensor& main = main_->full(region);
      const at::Tensor here = own.to(main.device());
      main.copy_(at::where(main.to(own.scalar_type()).eq(here), main, here.to(main.scalar_type())));
    }
    if (shards_) {
      shards_->full(region).copy_(own);
    }
  }
  versions_.mark_changed();
}

} // namespace zerocore
