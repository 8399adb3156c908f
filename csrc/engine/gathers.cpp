// Gathers of a unit, behind loads of this rank's part.
#include "engine/gathers.h"

#include <utility>

#include "engine/disk_states.h"

namespace zerocore {

void Gathers::begin(
    const std::vector<int>& regions,
    const GatherMemory& memory,
    const std::shared_future<void>& after) {
  std::vector<CollectiveCall> together;
  const bool joins = memory.bucket.regions().size() > 1 && context_.num_shards > 1 &&
      context_.collectives->launches_together();
  if (context_.tiers.parameters == Tier::Disk) {
    if (after.valid()) {
      after.get();
    }
    context_.disk->loads().load(id_);
  }
  for (const int region : regions) {
    gather(region, memory, after, joins ? &together : nullptr);
  }
  if (!together.empty()) {
    pending_ = context_.collectives->start_together(TraceOp::AllGather, std::move(together));
  }
}

void Gathers::wait() {
  wait_for_all(pending_, *context_.streams);
  for (const std::shared_future<void>& load : std::exchange(loads_, {})) {
    if (load.valid()) {
      load.get();
    }
  }
}

// With others in `together`, if that is given; else at once.
void Gathers::gather(
    int region,
    const GatherMemory& memory,
    std::shared_future<void> after,
    std::vector<CollectiveCall>* together) {
  const bool loads = context_.tiers.has_host_parameters();
  if (loads) {
    after = load(region, memory, after);
  }
  if (context_.num_shards == 1) { // the host had all of it
    loads_.push_back(std::move(after));
    return;
  }
  if (after.valid() && !context_.collectives->holds()) {
    after.get();
    after = {};
  }
  const at::Tensor& own = memory.shards == nullptr || loads ? memory.bucket.own_bytes(region)
                                                            : memory.shards->full_bytes(region);
  const at::Tensor& full = memory.received.full_bytes(region);
  const int64_t nbytes = context_.collectives->methods().gather.wire_nbytes(full.numel());
  CollectiveTag tag{&name_, context_.note(TraceOp::AllGather, id_, nbytes), id_};
  if (together != nullptr) {
    together->push_back({full, own, std::move(tag)});
  } else {
    pending_.push_back(context_.collectives->all_gather(full, own, std::move(tag), after));
  }
}

// This rank's part comes from the host, or from what was read of the disk. Over the emulated link
// it is under way when this returns; a device copies on the stream of the gather.
std::shared_future<void> Gathers::load(
    int region,
    const GatherMemory& memory,
    const std::shared_future<void>& after) {
  const at::Tensor& to = memory.bucket.own_bytes(region);
  const bool on_disk = context_.tiers.parameters == Tier::Disk; // read by what comes next
  const at::Tensor& shard = memory.shards->full_bytes(region);
  const at::Tensor from = on_disk ? context_.disk->loads().loaded(shard) : shard;
  const Streams& streams = *context_.streams;
  const auto record = context_.note(TraceOp::ToDevice, id_, to.numel());
  if (!on_disk && context_.host_link != nullptr && !streams.has_streams()) {
    HostLink::Transfer transfer{false, to.numel(), [to, from] { to.copy_(from); }, record, after};
    const auto arrival = transfer.arrival;
    context_.host_link->carry(std::move(transfer));
    return arrival->future();
  }
  if (after.valid()) {
    after.get();
  }
  if (record != nullptr) {
    record->begin = streams.record_timed(StreamRole::AllGather);
  }
  {
    const auto guard = streams.use(StreamRole::AllGather);
    to.copy_(from, /*non_blocking=*/!on_disk);
  }
  loaded_ = streams.record(StreamRole::AllGather);
  streams.note_write(StreamRole::AllGather, memory.bucket.own(region), "loads", name_);
  if (record != nullptr) {
    record->done_ns = now_ns(); // a device's events replace it
    record->end = streams.record_timed(StreamRole::AllGather);
  }
  return {};
}

} // namespace zerocore
