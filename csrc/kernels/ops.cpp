// Typed callers of the kernels.
#include "kernels/ops.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "common/math.h"
#include "kernels/checks.h"
#include "kernels/loops.h"
#include "kernels/memory.h"

namespace zerocore::kernels {

namespace {

void run_copy(const at::Tensor& like, Pair pair, const SegmentList& list, double scale) {
  if (list.size() > 0) {
    loops_of(like.device()).copy({like.device(), pair, list, scale});
  }
}

// The partial sums of the element types follow each other.
void run_sum_of_squares(const at::Tensor& out, const std::array<SegmentList, kNumElements>& lists) {
  const int64_t num_partials = std::accumulate(
      lists.begin(), lists.end(), int64_t{0}, [](int64_t sum, const SegmentList& list) {
        return sum + list.num_chunks();
      });
  const at::Tensor partials = at::empty({2 * num_partials}, out.options());
  auto* sums = reinterpret_cast<SquareSum*>(Memory(partials).data);
  const Loops& loops = loops_of(out.device());
  int64_t done = 0;
  for (size_t i = 0; i < lists.size(); ++i) {
    if (lists[i].size() > 0) {
      loops.square({out.device(), static_cast<Element>(i), lists[i], sums + done});
      done += lists[i].num_chunks();
    }
  }
  auto* total = reinterpret_cast<SquareSum*>(Memory(out).data);
  loops.total({out.device(), sums, num_partials, total});
}

} // namespace

void pack(const at::Tensor& bucket, const std::vector<PackSegment>& segments, double scale) {
  check_flat("pack", "bucket", bucket);
  const auto has_source = [](const PackSegment& segment) { return segment.source != nullptr; };
  const auto first = std::find_if(segments.begin(), segments.end(), has_source);
  const auto src_dtype =
      first == segments.end() ? bucket.scalar_type() : first->source->scalar_type();
  const Conversion found = conversion("pack", bucket.scalar_type(), src_dtype, false);
  const Memory target(bucket);
  SegmentList list;
  for (size_t i = 0; i < segments.size(); ++i) {
    const PackSegment& segment = segments[i];
    check_range("pack", i, segment.offset, segment.numel, bucket.numel());
    const void* source = nullptr;
    if (segment.source != nullptr) {
      check_member("pack", "gradient of piece", i, *segment.source, bucket, src_dtype);
      check_range("pack", i, segment.source_offset, segment.numel, segment.source->numel());
      source = Source(*segment.source).at(segment.source_offset);
    }
    if (source != nullptr || !segment.add) {
      list.push(target.at(segment.offset), source, segment.numel, segment.add);
    }
  }
  run_copy(bucket, found.pair, list, scale);
}

void copy_pieces(const at::Tensor& to, const at::Tensor& from, const std::vector<Piece>& pieces) {
  check_flat("copy_pieces", "to", to);
  check_flat("copy_pieces", "from", from);
  check_member("copy_pieces", "from", 0, from, to, to.scalar_type());
  const auto [pair, step] = conversion("copy_pieces", to.scalar_type(), from.scalar_type(), true);
  const Memory target(to);
  const Source source(from);
  SegmentList list;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    check_range("copy_pieces", i, piece.from, piece.numel, from.numel());
    check_range("copy_pieces", i, piece.to, piece.numel, to.numel());
    list.push(target.at(piece.to), source.at(piece.from), piece.numel * step);
  }
  run_copy(to, pair, list, 1.0);
}

void accumulate(
    const at::Tensor& out,
    const at::Tensor& chunks,
    int64_t num_chunks,
    bool add,
    double scale) {
  check_flat("accumulate", "out", out);
  check_flat("accumulate", "chunks", chunks);
  TORCH_CHECK_VALUE(num_chunks >= 1, "accumulate: num_chunks is ", num_chunks, ", expected >= 1");
  TORCH_CHECK_VALUE(
      chunks.numel() == checked_mul(out.numel(), num_chunks),
      "accumulate: chunks has ",
      chunks.numel(),
      " elements, expected ",
      num_chunks,
      " times the ",
      out.numel(),
      " of out");
  check_member("accumulate", "chunk", 0, chunks, out, chunks.scalar_type());
  const Conversion found = conversion("accumulate", out.scalar_type(), chunks.scalar_type(), false);
  if (num_chunks == 1) {
    SegmentList list;
    list.push(Memory(out).data, Source(chunks).data, out.numel(), add);
    run_copy(out, found.pair, list, scale);
  } else if (out.numel() > 0) {
    const AccumulateCall call{
        out.device(),
        found.pair,
        Memory(out).data,
        Source(chunks).data,
        out.numel(),
        num_chunks,
        scale,
        add};
    loops_of(out.device()).accumulate(call);
  }
}

void cast(const at::Tensor& bucket, at::TensorList sources, at::IntArrayRef offsets) {
  check_flat("cast", "bucket", bucket);
  check_count("cast", "offsets", offsets.size(), "sources", sources.size());
  const auto src_dtype = sources.empty() ? bucket.scalar_type() : sources[0].scalar_type();
  const auto [pair, step] = conversion("cast", bucket.scalar_type(), src_dtype, true);
  const Memory target(bucket);
  SegmentList list;
  for (size_t i = 0; i < sources.size(); ++i) {
    check_member("cast", "source", i, sources[i], bucket, src_dtype);
    check_range("cast", i, offsets[i], sources[i].numel(), bucket.numel());
    list.push(target.at(offsets[i]), Source(sources[i]).data, sources[i].numel() * step);
  }
  run_copy(bucket, pair, list, 1.0);
}

void sum_of_squares(const at::Tensor& out, at::TensorList shards) {
  check_flat("sum_of_squares", "out", out);
  TORCH_CHECK_VALUE(
      out.numel() == 2 && out.scalar_type() == at::kDouble,
      "sum_of_squares: out must be float64 of 2 elements, got ",
      out.scalar_type(),
      " of ",
      out.numel());
  std::array<SegmentList, kNumElements> lists; // one per element type
  for (size_t i = 0; i < shards.size(); ++i) {
    check_member("sum_of_squares", "shard", i, shards[i], out, shards[i].scalar_type());
    const auto element = element_of(shards[i].scalar_type());
    TORCH_CHECK_TYPE(
        element.has_value(),
        "sum_of_squares: shard ",
        i,
        " is ",
        shards[i].scalar_type(),
        ", expected float32, float16, bfloat16 or float64");
    SegmentList& list = lists[static_cast<size_t>(*element)];
    list.push(nullptr, Source(shards[i]).data, shards[i].numel());
  }
  run_sum_of_squares(out, lists);
}

} // namespace zerocore::kernels
