// Parameters as they come from the wire.
#include "engine/staging.h"

#include <vector>

#include "kernels/ops.h"

namespace zerocore {

Staging::Staging(
    UnitId unit,
    const Layout& layout,
    int64_t shard,
    c10::Device device,
    std::string name)
    : unit_(unit),
      layout_(layout),
      bucket_(layout, layout.all_regions(), shard, device, "unit '" + std::move(name) + "'") {}

void Staging::take(BucketPool& pool) {
  slot_ = pool.acquire({unit_, BlockUse::Gathered}, bucket_.nbytes(), StreamRole::AllGather);
  bucket_.attach(slot_.data);
}

void Staging::give_back(BucketPool& pool) {
  bucket_.detach();
  pool.release(slot_);
}

void Staging::copy_out(const Bucket& to, const Streams& streams, const std::string& unit) const {
  std::vector<kernels::Piece> pieces;
  for (const int index : bucket_.regions()) {
    const Region& region = layout_.regions()[index];
    pieces.clear();
    for (const int param : region.params) {
      const ParamPlace& place = layout_.places()[param];
      for (int64_t rank = 0; rank < layout_.num_shards(); ++rank) {
        const Range rows = layout_.owned(param, rank);
        const int64_t from = rank * region.shard_numel + place.shard_offset;
        pieces.push_back({from, place.offset + rows.begin, rows.size()});
      }
    }
    streams.note_read(StreamRole::Compute, bucket_.full(index), "copies out", unit);
    streams.note_write(StreamRole::Compute, to.full(index), "copies out", unit);
    kernels::copy_pieces(to.full(index), bucket_.full(index), pieces);
  }
}

} // namespace zerocore
