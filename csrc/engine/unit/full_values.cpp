// Full parameters of a unit for a while.
#include "engine/unit/full_values.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

#include "common/math.h"

namespace zerocore {

FullValues::FullValues(const Unit& unit)
    : unit_(unit),
      streams_(*unit.context().streams),
      bucket_(
          unit.layout().retyped(&Region::main),
          unit.layout().kept_regions(),
          unit.context().mesh.shard(),
          streams_.device(),
          "unit '" + unit.name() + "'") {
  bucket_.attach(allocate_memory(streams_.device(), bucket_.nbytes()));
}

void FullValues::fill(const std::vector<at::Tensor>& values) const {
  for (const int region : bucket_.regions()) {
    bucket_.full(region).zero_();
    streams_.note_write(StreamRole::Compute, bucket_.full(region), "is filled", unit_.name());
  }
  const std::vector<at::Tensor> views = by_param();
  for (size_t i = 0; i < views.size(); ++i) {
    if (values.at(i).defined()) {
      views[i].copy_(values[i]);
    }
  }
}

void FullValues::broadcast(Collectives& collectives) const {
  streams_.order(StreamRole::AllGather, StreamRole::Compute);
  std::vector<PendingCollective> pending;
  for (const int region : bucket_.regions()) {
    pending.push_back(collectives.broadcast(bucket_.full_bytes(region), {&unit_.name(), nullptr}));
  }
  wait_for_all(pending, streams_);
}

void FullValues::gather() const {
  const UnitContext& context = unit_.context();
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
      const CollectiveTag tag = unit_.tag(TraceOp::AllGather, to.numel());
      pending.push_back(collectives->start(TraceOp::AllGather, {to, own, tag}));
    }
    wait_for_all(pending, streams_);
  }
  // Units with encoded parameters have rows under `shard`, too.
  const Layout& layout = unit_.layout();
  for (const int region : layout.by_rows() ? bucket_.regions() : std::vector<int>()) {
    const at::Tensor wire = bucket_.full(region).clone();
    kernels::copy_pieces(bucket_.full(region), wire, row_pieces(layout, region));
  }
}

std::vector<at::Tensor> FullValues::by_param() const {
  std::vector<at::Tensor> views;
  for (const UnitParam& param : unit_.params()) {
    const ParamPlace& place = unit_.layout().places()[views.size()];
    views.push_back(bucket_.view(place.region, place.offset, param.spec.shape, param.strides));
  }
  return views;
}

namespace {

at::Tensor rows_of(const Unit& unit, const Bucket& full, int region) {
  const Layout& layout = unit.layout();
  const at::Tensor rows = at::zeros_like(full.own(region));
  for (const int param : layout.regions()[region].params) {
    const ParamPlace& place = layout.places()[param];
    const Range own = layout.owned(param, unit.context().mesh.shard());
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

at::Tensor staged_part(const Unit& unit, const Bucket& full, int region) {
  return unit.layout().by_rows() ? rows_of(unit, full, region) : full.own(region);
}

at::Tensor own_part(const Unit& unit, const Bucket& full, int region) {
  const at::Tensor part = staged_part(unit, full, region);
  const Region& types = unit.layout().regions()[region];
  if (!types.is_encoded()) {
    return part;
  }
  const at::Tensor& exact = unit.kept().full(region);
  const auto format = static_cast<at::ScalarType>(types.gather.dtype);
  return at::where(part.eq(on_its_way(exact, format)), exact, part);
}

} // namespace zerocore
