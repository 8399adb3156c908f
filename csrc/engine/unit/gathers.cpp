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

namespace {

void get_if_valid(const std::shared_future<void>& future) {
  if (future.valid()) {
    future.get();
  }
}

} // namespace

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

void Gathers::begin(
    const std::vector<int>& regions,
    int64_t version,
    const std::shared_future<void>& after,
    bool reads) {
  RECORD_USER_SCOPE("zerocore::all_gather (" + unit_.name() + ")"); // made for a profiler alone
  after_ = after;
  together_.clear(); // of gathers that failed
  const bool again = std::exchange(version_, version) == version;
  unsharding_.begin(regions, again, *this, reads && reads_peers());
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
      return read();
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
    case GatherStepKind::ReadPeers:
      return read_peers(step);
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

void Gathers::read() {
  get_if_valid(after_);
  context_.disk->load(unit_.id());
}

// This rank's part comes from the host, also if a file has its bytes. Over the emulated link
// it is under way when this returns; a device copies on the stream of the gather.
void Gathers::load(const GatherStep& step) {
  const Bucket& bucket = bucket_of(step.to);
  const at::Tensor& to = bucket.own_bytes(step.region);
  const bool on_disk = context_.tiers.parameters == Tier::Disk;
  const at::Tensor& from = own_->full_bytes(step.region);
  const Streams& streams = *context_.streams;
  const auto record = context_.note(TraceOp::ToDevice, unit_.id(), step.nbytes);
  arrival_ = {};
  if (!on_disk && context_.host_link != nullptr && !streams.has_streams()) {
    HostLink::Transfer transfer{false, to.numel(), [to, from] { to.copy_(from); }, record, after_};
    arrival_ = transfer.arrival->future();
    context_.host_link->carry(std::move(transfer));
  } else {
    get_if_valid(after_);
    if (!on_disk || context_.disk->is_loaded()) {
      load_on_stream(to, from, record.get());
    }
    streams.note_write(StreamRole::AllGather, bucket.own(step.region), "loads", unit_.name());
  }
  if (context_.mesh.num_shards() == 1) { // the host had all of it
    loads_.push_back(arrival_);
  }
}

void Gathers::load_on_stream(const at::Tensor& to, const at::Tensor& from, OpenRecord* record) {
  const Streams& streams = *context_.streams;
  if (record != nullptr) {
    record->begin = streams.record_timed(StreamRole::AllGather);
  }
  {
    const auto guard = streams.use(StreamRole::AllGather);
    const bool is_file = context_.tiers.parameters == Tier::Disk; // its memory is freed soon
    to.copy_(from, /*non_blocking=*/!is_file);
  }
  loaded_ = streams.record(StreamRole::AllGather);
  if (record != nullptr) {
    record->done_ns = now_ns(); // a device's events replace it
    record->end = streams.record_timed(StreamRole::AllGather);
  }
}

// On the stream of the gather, which compute does not wait for.
void Gathers::encode(const GatherStep& step) {
  get_if_valid(after_);
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
      step.from == ParamMemory::Own ? own_->full_bytes(step.region) : full_.own_bytes(step.region);
  issue(*context_.replicas, step, part_of(context_.mesh.state, step.region), own, {});
}

// On a device the stream of the gathers keeps the order.
void Gathers::wait_across() {
  launch();
  if (!context_.streams->has_streams()) {
    wait_for_all(pending_, *context_.streams);
  }
}

void Gathers::start(const GatherStep& step) {
  std::shared_future<void> after = context_.tiers.has_host_parameters() ? arrival_ : after_;
  const bool is_near = step.op == TraceOp::GatherNear;
  Collectives& collectives = is_near ? *context_.near : *context_.collectives;
  if (after.valid() && !collectives.can_defer_start()) {
    after.get();
    after = {};
  }
  issue(collectives, step, bucket_of(step.to).full_bytes(step.region), source_of(step), after);
}

void Gathers::read_peers(const GatherStep& step) {
  get_if_valid(after_);
  pending_.push_back(context_.collectives->read_peers(
      full_.full_bytes(step.region),
      own_->full_bytes(step.region),
      [&](int64_t rank) { return pieces_of(step.region, rank); },
      unit_.tag(step.op, step.nbytes)));
}

bool Gathers::reads_peers() const {
  return context_.collectives != nullptr && context_.collectives->reads_peers() &&
      !unit_.settings().gather;
}

std::vector<io::ProcessBytes> Gathers::pieces_of(int index, int64_t rank) const {
  const Region& region = layout_.regions()[index];
  const int64_t nbytes = region.shard_nbytes();
  if (!layout_.by_rows()) {
    return {{0, rank * nbytes, nbytes}};
  }
  std::vector<io::ProcessBytes> pieces;
  for (const int param : region.params) {
    const Range rows = layout_.owned(param, rank);
    if (!rows.empty()) {
      const int64_t from = layout_.offset_in_shard(param, rank);
      const int64_t to = layout_.places()[param].offset + rows.begin;
      const int64_t size = region.itemsize;
      pieces.push_back({from * size, to * size, rows.size() * size});
    }
  }
  return pieces;
}

void Gathers::issue(
    Collectives& collectives,
    const GatherStep& step,
    const at::Tensor& to,
    const at::Tensor& from,
    const std::shared_future<void>& after) {
  CollectiveTag tag = unit_.tag(step.op, step.nbytes);
  if (unit_.settings().gather && &collectives == context_.collectives) {
    tag.own = &unit_.settings().gather;
  }
  if (layout_.regions().size() > 1 && collectives.launches_together() && tag.own == nullptr) {
    together_by_ = &collectives;
    together_.push_back({to, from, std::move(tag)});
  } else {
    pending_.push_back(collectives.all_gather(to, from, std::move(tag), after));
  }
}

at::Tensor Gathers::source_of(const GatherStep& step) {
  if (step.from == ParamMemory::Near) {
    context_.streams->wait(StreamRole::AllGather, kept_);
    return near_.at(step.region);
  }
  if (step.op == TraceOp::GatherNear) {
    return part_of(context_.mesh.near, step.region);
  }
  if (context_.mesh.shards_across) {
    return part_of(context_.mesh.state, step.region);
  }
  return step.from == ParamMemory::Own ? own_->full_bytes(step.region)
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
  for (const std::shared_future<void>& load : std::exchange(loads_, {})) {
    get_if_valid(load);
  }
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
