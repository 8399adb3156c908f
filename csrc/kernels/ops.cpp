// Converts tensors to the lists of segments that the loops take.
#include "kernels/ops.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>

#include "common/math.h"
#include "kernels/checks.h"
#include "kernels/loops.h"

namespace zerocore::kernels {

namespace {

void run_copy(const at::Tensor& like, Pair pair, const SegmentList& list, double scale) {
  if (list.size() > 0) {
    loops_of(like.device()).copy({like.device(), pair, list, scale});
  }
}

// See Note [Chunks].
SegmentList list_for(Pair pair) {
  return SegmentList(pair.dst == Element::Byte ? kByteChunkNumel : kChunkNumel);
}

// Returns the number of elements from the first run's begin to the last run's end, gaps included.
int64_t extent(int64_t numel, const Runs& runs) {
  if (runs.numel == 0 || numel == 0) {
    return numel;
  }
  const int64_t before = (numel - 1) / runs.numel; // runs before the last one
  return before * runs.stride + numel - before * runs.numel;
}

ScaledFormat format_of(const char* op, c10::ScalarType format) {
  TORCH_CHECK_TYPE(
      format == at::kChar || format == at::kFloat8_e4m3fn,
      op,
      ": format is ",
      format,
      ", expected float8_e4m3fn or int8");
  return format == at::kChar ? ScaledFormat::Int8 : ScaledFormat::Float8;
}

// Rejects a misaligned tensor: a misaligned word access ends the process's use of a GPU.
void check_aligned(const char* op, const char* name, const at::Tensor& tensor, int64_t nbytes) {
  const auto past = reinterpret_cast<uintptr_t>(Source(tensor).data) % nbytes;
  TORCH_CHECK_VALUE(
      past == 0,
      op,
      ": ",
      name,
      " starts at an address that is ",
      past,
      " modulo ",
      nbytes,
      ", expected a multiple of ",
      nbytes,
      " bytes. Start the view there, or pass a tensor that is no view.");
}

// Checks dtypes and alignment: each block contains a float, its scale.
void check_blocks(const char* op, const at::Tensor& blocks, const at::Tensor& values) {
  check_flat(op, "blocks", blocks);
  check_flat(op, "values", values);
  TORCH_CHECK_TYPE(
      blocks.scalar_type() == at::kByte && is_narrow(values.scalar_type()),
      op,
      ": blocks are ",
      blocks.scalar_type(),
      " and values ",
      values.scalar_type(),
      ", expected uint8 and float32, float16 or bfloat16");
  check_aligned(op, "blocks", blocks, sizeof(float));
}

constexpr std::array kElements = {
    Element::Half,
    Element::BFloat16,
    Element::Float,
    Element::Double};
using SquareLists = std::array<SegmentList, kElements.size()>; // by element type

// Computes both sums of each chunk. If the sums of a segment are known, its `dst` points to them.
void find_squares(
    c10::Device device,
    Element element,
    const SegmentList& list,
    SquareSum* squares) {
  const Loops& loops = loops_of(device);
  const auto is_known = [](const Segment& segment) { return segment.dst != nullptr; };
  if (std::none_of(list.begin(), list.end(), is_known)) {
    loops.square({device, element, list, squares});
    return;
  }
  for (const Segment& segment : list) {
    SquareSum* to = squares + segment.first_chunk;
    if (is_known(segment)) {
      const auto* known = static_cast<const SquareSum*>(segment.dst);
      std::copy_n(known, num_chunks_of(segment.numel), to);
    } else {
      SegmentList one;
      one.push({nullptr, segment.src, segment.numel});
      loops.square({device, element, one, to});
    }
  }
}

// Returns the known squares of shard `index`, or null.
void* known_squares(const std::vector<at::Tensor>& known, size_t index, const at::Tensor& shard) {
  if (known.empty() || !known[index].defined()) {
    return nullptr;
  }
  TORCH_CHECK_VALUE(
      shard.is_cpu() && known[index].is_cpu() && known[index].scalar_type() == at::kDouble &&
          known[index].numel() == 2 * num_chunks_of(shard.numel()),
      "sum_of_squares: known[",
      index,
      "] must be float64 of ",
      2 * num_chunks_of(shard.numel()),
      " elements on the CPU, got ",
      known[index].toString(),
      " of ",
      known[index].numel());
  return Memory(known[index]).data;
}

// Each element type adds its partial sums after those of the previous type.
void run_sum_of_squares(const at::Tensor& out, const SquareLists& lists) {
  int64_t num_partials = 0;
  for (const SegmentList& list : lists) {
    num_partials += list.num_chunks();
  }
  const at::Tensor partials = at::empty({2 * num_partials}, out.options());
  auto* sums = reinterpret_cast<SquareSum*>(Memory(partials).data);
  const Loops& loops = loops_of(out.device());
  int64_t done = 0;
  for (size_t i = 0; i < lists.size(); ++i) {
    if (lists[i].size() > 0) {
      find_squares(out.device(), kElements[i], lists[i], sums + done);
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
  const auto found_itemsize = static_cast<int64_t>(c10::elementSize(src_dtype));
  SegmentList list;
  for (size_t i = 0; i < segments.size(); ++i) {
    const PackSegment& segment = segments[i];
    const Runs& runs = segment.runs;
    check_range("pack", i, segment.offset, extent(segment.numel, runs), bucket.numel());
    const void* source = nullptr;
    if (segment.source != nullptr) {
      check_member("pack", "gradient of piece", i, *segment.source, bucket, src_dtype);
      check_range("pack", i, segment.source_offset, segment.numel, segment.source->numel());
      source = Source(*segment.source).at(segment.source_offset);
    }
    if (source != nullptr || !segment.add) {
      list.push(
          {target.at(segment.offset),
           source,
           segment.numel * found.step,
           segment.add,
           runs.numel * found.step,
           runs.stride * target.itemsize,
           runs.numel * found_itemsize});
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
  SegmentList list = list_for(pair);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const Runs& runs = piece.runs;
    check_range("copy_pieces", i, piece.from, extent(piece.numel, runs), from.numel());
    check_range("copy_pieces", i, piece.to, piece.numel, to.numel());
    list.push(
        {target.at(piece.to),
         source.at(piece.from),
         piece.numel * step,
         false,
         runs.numel * step,
         runs.numel * target.itemsize,
         runs.stride * source.itemsize});
  }
  run_copy(to, pair, list, 1.0);
}

void encode(const at::Tensor& blocks, const at::Tensor& source, c10::ScalarType format) {
  check_blocks("encode", blocks, source);
  check_member("encode", "source", 0, source, blocks, source.scalar_type());
  check_aligned("encode", "source", source, kVectorNbytes);
  const int64_t num_blocks = source.numel() / kScaledNumel;
  TORCH_CHECK_VALUE(
      source.numel() % kScaledNumel == 0 && blocks.numel() == scaled_nbytes(source.numel()),
      "encode: ",
      source.numel(),
      " elements do not fill ",
      blocks.numel(),
      " bytes of blocks");
  if (num_blocks > 0) {
    loops_of(blocks.device())
        .encode(
            {blocks.device(),
             source.scalar_type(),
             format_of("encode", format),
             Memory(blocks).data,
             Source(source).data,
             num_blocks});
  }
}

void decode(
    const at::Tensor& to,
    const at::Tensor& blocks,
    const std::vector<Piece>& pieces,
    c10::ScalarType format) {
  check_blocks("decode", blocks, to);
  check_member("decode", "blocks", 0, blocks, to, at::kByte);
  const Memory target(to);
  const Source source(blocks);
  SegmentList list;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    check_range(
        "decode",
        i,
        piece.from,
        extent(piece.numel, piece.runs),
        blocks.numel() / kScaledNbytes * kScaledNumel);
    check_range("decode", i, piece.to, piece.numel, to.numel());
    TORCH_INTERNAL_ASSERT(piece.runs.stride % kScaledNumel == 0);
    list.push(
        {target.at(piece.to),
         source.at(scaled_place(piece.from)),
         piece.numel,
         false,
         piece.runs.numel,
         piece.runs.numel * target.itemsize,
         scaled_place(piece.runs.stride)});
  }
  if (list.size() > 0) {
    loops_of(to.device())
        .decode({to.device(), to.scalar_type(), format_of("decode", format), list, source.data});
  }
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
    list.push({Memory(out).data, Source(chunks).data, out.numel() * found.step, add});
    run_copy(out, found.pair, list, scale);
  } else if (out.numel() > 0) {
    const AccumulateCall call{
        out.device(),
        found.pair,
        Memory(out).data,
        Source(chunks).data,
        out.numel() * found.step,
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
  SegmentList list = list_for(pair);
  for (size_t i = 0; i < sources.size(); ++i) {
    check_member("cast", "source", i, sources[i], bucket, src_dtype);
    check_range("cast", i, offsets[i], sources[i].numel(), bucket.numel());
    list.push({target.at(offsets[i]), Source(sources[i]).data, sources[i].numel() * step});
  }
  run_copy(bucket, pair, list, 1.0);
}

void sum_of_squares(
    const at::Tensor& out,
    at::TensorList shards,
    const std::vector<at::Tensor>& known) {
  check_flat("sum_of_squares", "out", out);
  if (!known.empty()) {
    check_count("sum_of_squares", "known", known.size(), "shards", shards.size());
  }
  TORCH_CHECK_VALUE(
      out.numel() == 2 && out.scalar_type() == at::kDouble,
      "sum_of_squares: out must be float64 of 2 elements, got ",
      out.scalar_type(),
      " of ",
      out.numel());
  SquareLists lists;
  for (size_t i = 0; i < shards.size(); ++i) {
    check_member("sum_of_squares", "shard", i, shards[i], out, shards[i].scalar_type());
    const auto* element = std::find(kElements.begin(), kElements.end(), shards[i].scalar_type());
    TORCH_CHECK_TYPE(
        element != kElements.end(),
        "sum_of_squares: shard ",
        i,
        " is ",
        shards[i].scalar_type(),
        ", expected float32, float16, bfloat16 or float64");
    SegmentList& list = lists[element - kElements.begin()];
    list.push({known_squares(known, i, shards[i]), Source(shards[i]).data, shards[i].numel()});
  }
  run_sum_of_squares(out, lists);
}

void squares_by_chunk(const at::Tensor& squares, at::TensorList shards) {
  SegmentList list;
  for (size_t i = 0; i < shards.size(); ++i) {
    check_member("squares_by_chunk", "shard", i, shards[i], squares, shards[0].scalar_type());
    list.push({nullptr, Source(shards[i]).data, shards[i].numel()});
  }
  TORCH_INTERNAL_ASSERT(squares.numel() == 2 * list.num_chunks());
  if (list.size() > 0) {
    const Element element = shards[0].scalar_type();
    TORCH_INTERNAL_ASSERT(can_compute(element));
    auto* sums = reinterpret_cast<SquareSum*>(Memory(squares).data);
    loops_of(squares.device()).square({squares.device(), element, list, sums});
  }
}

} // namespace zerocore::kernels
