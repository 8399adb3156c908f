// All-to-alls of an optimizer of whole matrices.
#include "engine/exchange.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <utility>

#include "engine/engine_parts.h"

namespace zerocore {

namespace {

int64_t sum_of(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

} // namespace

Exchange start_exchange(
    EngineParts& parts,
    bool across,
    const at::Tensor& sent,
    MessageSizes sizes) {
  Collectives* group = across ? parts.groups.replicas.get() : parts.groups.shard.get();
  TORCH_INTERNAL_ASSERT(group != nullptr, "an exchange over a group that the model does not have");
  const int64_t leaves = sum_of(sizes.sent) - sizes.sent.at(group->rank());
  Exchange exchange;
  exchange.received =
      at::empty({sum_of(sizes.received) / static_cast<int64_t>(sent.itemsize())}, sent.options());
  CollectiveTag tag{
      &kOptimizer,
      parts.trace.add(TraceOp::AllToAll, -1, leaves, parts.pool.stats().in_use_nbytes)};
  parts.streams.note_write(StreamRole::Compute, sent, "sends", kOptimizer);
  parts.streams.order(StreamRole::ReduceScatter, StreamRole::Compute);
  // As bytes: backends know few dtypes.
  exchange.pending = group->all_to_all(
      exchange.received.view(at::kByte), sent.view(at::kByte), std::move(sizes), std::move(tag));
  return exchange;
}

at::Tensor finish_exchange(EngineParts& parts, Exchange& exchange) {
  exchange.pending.wait(parts.streams);
  parts.streams.note_read(StreamRole::Compute, exchange.received, "receives", kOptimizer);
  return exchange.received;
}

} // namespace zerocore
