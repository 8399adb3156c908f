// Carries out gathers of a unit with tensors and collectives.
#include "engine/unit/gathers.h"

#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "engine/unit/disk_states.h"
#include "engine/unit/full_values.h"
#include "engine/unit/unit.h"
#include "kernels/ops.h"

namespace zerocore {

Gathers::Gathers(const Unit& unit, Bucket& full, const Bucket* own)
    : unit_(unit),
      context_(unit.context()),
      layout_(unit.layout()),
      full_(full),
      own_(own),
      unsharding_(unit.id(), context_.mesh, context_.tiers, layout_) {
  if (layout_.copies_out()) {
    received_.emplace(
        layout_.encoded(),
        layout_.gathered_regions(),
        context_.mesh.shard(),
        context_.streams->device(),
        "unit '" + unit.name() + "'");
  }
}

void Gathers::begin(const std::vector<int>& regions, int64_t version) {
  RECORD_USER_SCOPE("zerocore::all_gather (" + unit_.name() + ")"); // made for a profiler alone
  together_.clear(); // of gathers that failed
  const bool again = std::exchange(version_, version) == version;
  unsharding_.begin(regions, again, *this);
}

void Gathers::set_keeps_near(bool keeps) {
  unsharding_.set_keeps_near(keeps);
  if (!keeps && !near_.empty()) {
    context_.streams->order(StreamRole::Compute, StreamRole::AllGather); // which may read it
    near_.clear();
  }
}

void Gathers::run(const GatherStep& step) {
  switch (step.kind) {
    case GatherStepKind::Count:
      context_.note(step.op, unit_.id(), step.nbytes);
      return;
    case GatherStepKind::Take:
      return take(step);
    case GatherStepKind::GiveBack:
      return give_back(step);
    case GatherStepKind::Order:
      return context_.streams->order(StreamRole::AllGather, StreamRole::Compute);
    case GatherStepKind::Read:
      return context_.disk->load(unit_.id());
    case GatherStepKind::Load:
      return load(step);
    case GatherStepKind::Encode:
      return encode(step);
    case GatherStepKind::StartAcross:
      return start_across(step);
    case GatherStepKind::WaitAcross:
      return wait_across();
    case GatherStepKind::Start:
      return start(step);
    case GatherStepKind::Launch:
      return launch();
    case GatherStepKind::Wait: {
      RECORD_USER_SCOPE("zerocore::wait_all_gather (" + unit_.name() + ")");
      return finish();
    }
    case GatherStepKind::CopyOut:
      return copy_out();
    case GatherStepKind::Show:
      return full_.show();
    case GatherStepKind::Keep:
      return keep();
  }
}

void Gathers::take(const GatherStep& step) {
  Slot& slot = slot_of(step.to);
  slot = context_.pool->acquire(block_of(step), step.nbytes, step.user);
  bucket_of(step.to).attach(slot.data);
}

void Gathers::give_back(const GatherStep& step) {
  bucket_of(step.from).detach();
  context_.pool->release(slot_of(step.from));
}

// This rank's part comes from the host, also if a file has its bytes, on the stream of the gather.
void Gathers::load(const GatherStep& step) {
  const Bucket& bucket = bucket_of(step.to);
  const bool on_disk = context_.tiers.parameters == Tier::Disk;
  const at::Tensor& from = own_->full_bytes(step.region);
  const Streams& streams = *context_.streams;
  const auto record = context_.note(TraceOp::ToDevice, unit_.id(), step.nbytes);
  if (record != nullptr) {
    record->begin = streams.record_timed(StreamRole::AllGather);
  }
  if (!on_disk || context_.disk->is_loaded()) {
    const auto guard = streams.use(StreamRole::AllGather);
    // The memory of a file is freed soon.
    bucket.own_bytes(step.region).copy_(from, /*non_blocking=*/!on_disk);
  }
  loaded_ = streams.record(StreamRole::AllGather);
  if (record != nullptr) {
    record->done_ns = now_ns(); // a device's events replace it
    record->end = streams.record_timed(StreamRole::AllGather);
  }
  streams.note_write(StreamRole::AllGather, bucket.own(step.region), "loads", unit_.name());
}

// On the stream of the gather, which compute does not wait for.
void Gathers::encode(const GatherStep& step) {
  const auto guard = context_.streams->use(StreamRole::AllGather);
  const at::Tensor& to = received_->own(step.region);
  const at::Tensor& from = own_->full(step.region);
  context_.streams->note_read(StreamRole::AllGather, from, "encodes", unit_.name());
  context_.streams->note_write(StreamRole::AllGather, to, "encodes", unit_.name());
  const auto format = static_cast<at::ScalarType>(layout_.regions()[step.region].gather.dtype);
  kernels::encode(to, from, format);
}

void Gathers::start_across(const GatherStep& step) {
  const at::Tensor& own =
      step.from == Memory::Shard ? own_->full_bytes(step.region) : full_.own_bytes(step.region);
  issue(*context_.replicas, step, part_of(context_.mesh.state, step.region), own);
}

// On a device the stream of the gathers keeps the order.
void Gathers::wait_across() {
  launch();
  if (!context_.streams->has_streams()) {
    wait_for_all(pending_, *context_.streams);
  }
}

void Gathers::start(const GatherStep& step) {
  const bool is_near = step.op == TraceOp::GatherNear;
  Collectives& collectives = is_near ? *context_.near : *context_.collectives;
  issue(collectives, step, bucket_of(step.to).full_bytes(step.region), source_of(step));
}

void Gathers::issue(
    Collectives& collectives,
    const GatherStep& step,
    const at::Tensor& to,
    const at::Tensor& from) {
  CollectiveTag tag = unit_.tag(step.op, step.nbytes);
  if (unit_.settings().gather && &collectives == context_.collectives) {
    tag.own = &unit_.settings().gather;
  }
  if (layout_.regions().size() > 1 && collectives.launches_together() && tag.own == nullptr) {
    together_by_ = &collectives;
    together_.push_back({to, from, std::move(tag)});
  } else {
    pending_.push_back(collectives.all_gather(to, from, std::move(tag)));
  }
}

at::Tensor Gathers::source_of(const GatherStep& step) {
  if (step.from == Memory::Near) {
    context_.streams->wait(StreamRole::AllGather, kept_);
    return near_.at(step.region);
  }
  if (step.op == TraceOp::GatherNear) {
    return part_of(context_.mesh.near, step.region);
  }
  if (context_.mesh.shards_across) {
    return part_of(context_.mesh.state, step.region);
  }
  return step.from == Memory::Shard ? own_->full_bytes(step.region)
                                    : bucket_of(step.from).own_bytes(step.region);
}

at::Tensor Gathers::part_of(const Axis& axis, int region) const {
  const at::Tensor& full = full_.full_bytes(region);
  const int64_t nbytes = full.numel() / axis.size;
  return full.narrow(0, axis.rank * nbytes, nbytes);
}

// On the compute stream.
void Gathers::keep() {
  near_.resize(layout_.regions().size());
  for (const int region : full_.regions()) {
    const at::Tensor part = part_of(context_.mesh.near, region);
    at::Tensor& near = near_.at(region);
    if (!near.defined()) {
      const c10::InferenceMode normal(false); // later steps write to it, too
      near = at::empty_like(part);
    }
    context_.streams->note_write(StreamRole::Compute, near, "keeps for near ranks", unit_.name());
    near.copy_(part);
  }
  kept_ = context_.streams->record(StreamRole::Compute);
}

void Gathers::launch() {
  if (!together_.empty()) {
    auto started = together_by_->start_together(TraceOp::AllGather, std::exchange(together_, {}));
    std::ranges::move(started, std::back_inserter(pending_));
  }
}

void Gathers::finish() {
  wait_for_all(pending_, *context_.streams);
  if (context_.mesh.num_shards() == 1) {
    context_.streams->order(StreamRole::Compute, StreamRole::AllGather);
  }
}

// On the compute stream. See Note [Shards of rows].
void Gathers::copy_out() {
  for (const int index : full_.regions()) {
    const Region& region = layout_.regions()[index];
    const std::vector<kernels::Piece> pieces = layout_.by_rows()
        ? row_pieces(layout_, index)
        : std::vector<kernels::Piece>{{0, 0, region.numel()}};
    context_.streams->note_read(
        StreamRole::Compute, received_->full(index), "copies out", unit_.name());
    context_.streams->note_write(
        StreamRole::Compute, full_.full(index), "copies out", unit_.name());
    if (region.is_encoded()) {
      const auto format = static_cast<at::ScalarType>(region.gather.dtype);
      kernels::decode(full_.full(index), received_->full(index), pieces, format);
    } else {
      kernels::copy_pieces(full_.full(index), received_->full(index), pieces);
    }
  }
}

} // namespace zerocore
