// All-to-alls of an optimizer of whole matrices.
#include "engine/exchange.h"

#include <ATen/ops/empty.h>

#include <numeric>
#include <utility>

namespace zerocore {

namespace {

int64_t sum_of(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

} // namespace

Exchange::Exchange(
    const UnitContext& context,
    Collectives& group,
    const at::Tensor& sent,
    MessageSizes sizes)
    : streams_(*context.streams),
      received_(
          at::empty(
              {sum_of(sizes.received) / static_cast<int64_t>(sent.itemsize())},
              sent.options())) {
  const int64_t leaves = sum_of(sizes.sent) - sizes.sent.at(group.rank());
  CollectiveTag tag{&kOptimizer, context.note(TraceOp::AllToAll, -1, leaves)};
  streams_.note_write(StreamRole::Compute, sent, "sends", kOptimizer);
  streams_.order(group.reducing(), StreamRole::Compute);
  // As bytes: backends know few dtypes.
  pending_ = group.all_to_all(
      {received_.view(at::kByte), sent.view(at::kByte), std::move(tag)}, std::move(sizes));
}

at::Tensor Exchange::wait() {
  pending_.wait(streams_);
  streams_.note_read(StreamRole::Compute, received_, "receives", kOptimizer);
  return received_;
}

} // namespace zerocore
