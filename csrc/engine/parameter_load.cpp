// Brings this rank's part of a region from the host.
#include "engine/parameter_load.h"

#include <utility>

namespace zerocore {

namespace {

std::shared_future<void> load_over_link(
    const UnitContext& context,
    const at::Tensor& to,
    const at::Tensor& from,
    const std::shared_ptr<OpenRecord>& record,
    const std::shared_future<void>& after) {
  HostLink::Transfer transfer{false, to.numel(), [to, from] { to.copy_(from); }, record, after};
  const auto arrival = transfer.arrival;
  context.host_link->carry(std::move(transfer));
  if (context.num_shards > 1 && !context.collectives->holds()) {
    arrival->future().get();
    return {};
  }
  return arrival->future();
}

} // namespace

std::shared_future<void> load_parameters(
    const UnitContext& context,
    UnitId unit,
    const std::string& name,
    const at::Tensor& to,
    const at::Tensor& from,
    const std::shared_future<void>& after) {
  const Streams& streams = *context.streams;
  const auto record = context.note(TraceOp::ToDevice, unit, to.numel());
  if (context.host_link != nullptr && !streams.has_streams()) {
    return load_over_link(context, to, from, record, after);
  }
  if (after.valid()) {
    after.get();
  }
  if (record != nullptr) {
    record->begin = streams.record_timed(StreamRole::AllGather);
  }
  {
    const auto guard = streams.use(StreamRole::AllGather);
    to.copy_(from, /*non_blocking=*/true);
  }
  streams.note_write(StreamRole::AllGather, to, "loads", name);
  if (record != nullptr) {
    record->done_ns = now_ns(); // a device's events replace it
    record->end = streams.record_timed(StreamRole::AllGather);
  }
  return {};
}

void wait_for_all(std::vector<std::shared_future<void>>& loads) {
  for (const std::shared_future<void>& load : std::exchange(loads, {})) {
    if (load.valid()) {
      load.get();
    }
  }
}

} // namespace zerocore
