// Full parameters of a unit for a while.
#include "engine/unit/full_values.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

#include "common/scaled_blocks.h"

namespace zerocore {

FullValues::FullValues(
    const Layout& layout,
    int64_t shard,
    const Streams& streams,
    const std::string& unit)
    : layout_(layout),
      streams_(streams),
      unit_(unit),
      bucket_(
          layout.retyped(&Region::main),
          layout.kept_regions(),
          shard,
          streams.device(),
          "unit '" + unit + "'") {
  bucket_.attach(allocate_memory(streams.device(), bucket_.nbytes()));
}

void FullValues::fill(const std::vector<UnitParam>& params, const std::vector<at::Tensor>& values)
    const {
  for (const int region : bucket_.regions()) {
    bucket_.full(region).zero_();
    streams_.note_write(StreamRole::Compute, bucket_.full(region), "is filled", unit_);
  }
  const std::vector<at::Tensor> views = of(params);
  for (size_t i = 0; i < params.size(); ++i) {
    if (values.at(i).defined()) {
      views[i].copy_(values[i]);
    }
  }
}

void FullValues::broadcast(Collectives& collectives) const {
  streams_.order(StreamRole::AllGather, StreamRole::Compute);
  std::vector<PendingCollective> pending;
  for (const int region : bucket_.regions()) {
    pending.push_back(collectives.broadcast(bucket_.full_bytes(region), {&unit_, nullptr}));
  }
  wait_for_all(pending, streams_);
}

void FullValues::gather(
    const UnitContext& context,
    const std::function<CollectiveTag(int64_t)>& tag) const {
  // Parts of a replica's shard first, see Note [Sharded across].
  const Axis whole, &state = context.mesh.state;
  std::vector<std::pair<Collectives*, Axis>> levels = {{context.collectives, whole}};
  if (context.mesh.shards_across) {
    levels.insert(levels.begin(), {context.replicas, state});
  }
  streams_.order(StreamRole::AllGather, StreamRole::Compute);
  for (const auto& [collectives, axis] : levels) {
    std::vector<PendingCollective> pending;
    for (const int region : bucket_.regions()) {
      const at::Tensor to = bucket_.full_bytes(region).chunk(axis.size)[axis.rank];
      const at::Tensor own = to.chunk(collectives->size())[collectives->rank()];
      pending.push_back(collectives->all_gather(to, own, tag(to.numel())));
    }
    wait_for_all(pending, streams_);
  }
  for (const int region : layout_.by_rows() ? bucket_.regions() : std::vector<int>()) {
    const at::Tensor wire = bucket_.full(region).clone();
    kernels::copy_pieces(bucket_.full(region), wire, row_pieces(layout_, region));
  }
}

std::vector<at::Tensor> FullValues::of(const std::vector<UnitParam>& params) const {
  std::vector<at::Tensor> views;
  for (size_t i = 0; i < params.size(); ++i) {
    const ParamPlace& place = layout_.places()[i];
    views.push_back(
        bucket_.view(place.region, place.offset, params[i].spec.shape, params[i].strides));
  }
  return views;
}

namespace {

at::Tensor rows_of(const Layout& layout, const Bucket& full, int region, int64_t shard) {
  const at::Tensor rows = at::zeros_like(full.own(region));
  for (const int param : layout.regions()[region].params) {
    const ParamPlace& place = layout.places()[param];
    const Range own = layout.owned(param, shard);
    rows.narrow(0, place.shard_offset, own.size())
        .copy_(full.full(region).narrow(0, place.offset + own.begin, own.size()));
  }
  return rows;
}

at::Tensor on_its_way(const at::Tensor& shard, at::ScalarType format) {
  const auto bytes = shard.options().dtype(at::kByte);
  const at::Tensor blocks = at::empty({scaled_nbytes(shard.numel())}, bytes);
  const at::Tensor gathered = at::empty_like(shard);
  kernels::encode(blocks, shard, format);
  kernels::decode(gathered, blocks, {{0, 0, shard.numel()}}, format);
  return gathered;
}

} // namespace

std::vector<kernels::Piece> row_pieces(const Layout& layout, int region) {
  std::vector<kernels::Piece> pieces;
  for (const int param : layout.regions()[region].params) {
    const auto [from, numel, run, stride] = layout.wire_runs(param);
    pieces.push_back({from, layout.places()[param].offset, numel, {run, stride}});
  }
  return pieces;
}

at::Tensor staged_part(const Layout& layout, const Bucket& full, int region, int64_t shard) {
  return layout.by_rows() ? rows_of(layout, full, region, shard) : full.own(region);
}

at::Tensor own_part(
    const Layout& layout,
    const Bucket& full,
    int region,
    int64_t shard,
    const std::optional<Bucket>& shards) {
  const at::Tensor part = staged_part(layout, full, region, shard);
  const Region& types = layout.regions()[region];
  if (!types.is_encoded()) {
    return part;
  }
  const at::Tensor& exact = shards->full(region);
  const auto format = static_cast<at::ScalarType>(types.gather.dtype);
  return at::where(part.eq(on_its_way(exact, format)), exact, part);
}

} // namespace zerocore
