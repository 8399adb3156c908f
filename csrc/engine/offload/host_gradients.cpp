#include "engine/offload/host_gradients.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "engine/unit/offloaded_states.h"
#include "kernels/ops.h"
#include "kernels/segments.h"

namespace zerocore {

StreamEvent copy_to_host(const Unit& unit, const at::Tensor& host, const at::Tensor& from) {
  const Streams& streams = *unit.context().streams;
  streams.order(StreamRole::DeviceToHost, StreamRole::Compute);
  streams.note_read(StreamRole::DeviceToHost, from, "leaves", unit.name());
  {
    const auto guard = streams.use(StreamRole::DeviceToHost);
    host.copy_(from, /*non_blocking=*/true);
  }
  return streams.record(StreamRole::DeviceToHost);
}

StepWorker::Ticket HostGradients::offload_grad(
    const Unit& unit,
    const at::Tensor& from,
    const at::Tensor& kept,
    bool adds) {
  const bool in_place = !adds && from.scalar_type() == kept.scalar_type();
  const at::Tensor to = in_place ? kept : take_buffer(from);
  const StreamEvent copied = copy_to_host(unit, to, from);
  const auto record =
      context_.note(TraceOp::ToHost, unit.id(), static_cast<int64_t>(from.nbytes()));
  const auto ticket = worker_.submit(record, [copied, to, kept, adds, in_place] {
    Streams::synchronize(copied);
    if (!in_place) {
      kernels::accumulate(kept, to, /*num_parts=*/1, adds);
    }
  });
  if (!in_place) {
    used_until_[current_] = ticket;
  }
  return ticket;
}

// Returns the other buffer, after its last use. Returns new memory for a region that does not fit,
// because it was frozen when the model was sharded.
at::Tensor HostGradients::take_buffer(const at::Tensor& like) {
  const HostLayout& layout = context_.host->layout();
  current_ = 1 - current_;
  worker_.wait(used_until_[current_]);
  const Range buffer = layout.landing_buffer(static_cast<int>(current_));
  if (static_cast<int64_t>(like.nbytes()) > buffer.size()) {
    return at::empty({like.numel()}, like.options().device(at::kCPU));
  }
  return context_.host->mapped()->view(buffer.begin, like.numel(), like.scalar_type());
}

ArrivedSquares::ArrivedSquares(const Layout& layout, int64_t shard)
    : layout_(layout),
      shard_(shard),
      first_chunks_(layout.places().size()),
      squares_(layout.regions().size()),
      is_known_(layout.regions().size()) {
  for (const Region& region : layout.regions()) {
    int64_t count = 0;
    for (const int param : region.params) {
      first_chunks_[param] = count;
      count += kernels::num_chunks_of(layout.owned(param, shard).size());
    }
    num_chunks_.push_back(count);
  }
}

std::function<void()> ArrivedSquares::take(int region, const at::Tensor& gradient) {
  at::Tensor& squares = squares_[region];
  if (!squares.defined()) {
    squares = at::empty({2 * num_chunks_[region]}, at::kDouble);
  }
  std::vector<at::Tensor> parts;
  for (const int param : layout_.regions()[region].params) {
    const int64_t numel = layout_.owned(param, shard_).size();
    parts.push_back(gradient.narrow(0, layout_.offset_in_shard(param, shard_), numel));
  }
  is_known_[region] = true;
  return [squares, parts = std::move(parts)] { kernels::squares_by_chunk(squares, parts); };
}

void ArrivedSquares::forget() {
  is_known_.assign(is_known_.size(), false);
}

at::Tensor ArrivedSquares::of(int param) const {
  const int64_t count = kernels::num_chunks_of(layout_.owned(param, shard_).size());
  return squares_[layout_.places()[param].region].narrow(0, 2 * first_chunks_[param], 2 * count);
}

Moments::Moments(const Units& units, const UnitContext& context) {
  for (const auto& unit : units) {
    OfUnit& own = units_.emplace_back(OfUnit{*unit, {}, {}});
    own.given.resize(unit->params().size());
    const Layout main =
        unit->layout().of_shard(unit->context().mesh.shard()).retyped(&Region::main);
    const std::vector<int> regions = Tiers::trained_regions(main);
    if (regions.empty()) {
      continue;
    }
    const std::string owner = "the moments of unit '" + unit->name() + "'";
    for (const Memory part : {Memory::ExpAvg, Memory::ExpAvgSq}) {
      auto& bucket = own.buckets[part == Memory::ExpAvg ? 0 : 1];
      bucket.emplace(main, regions, 0, c10::kCPU, owner);
      bucket->attach(context.memory_of(context.tiers.states, unit->id(), part, *bucket));
    }
  }
}

std::vector<at::Tensor> Moments::make(UnitId id, int param) {
  OfUnit& own = units_.at(id);
  const Unit& unit = own.unit;
  const int region = unit.layout().places().at(param).region;
  if (!own.buckets[0] || !own.buckets[0]->has(region)) {
    return {};
  }
  std::optional<Given>& given = own.given.at(param);
  if (given && !given->expired()) {
    return {};
  }
  const int64_t offset = unit.layout().offset_in_shard(param, unit.context().mesh.shard());
  std::vector<at::Tensor> made;
  for (const auto& bucket : own.buckets) {
    made.push_back(bucket->view(region, offset, unit.shard_sizes(param)));
    if (given) {
      made.back().zero_(); // they hold the values of a freed optimizer
    }
  }
  given.emplace(made.front().getIntrusivePtr());
  return made;
}

} // namespace zerocore
