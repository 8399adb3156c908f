// Moves segments on the CPU, with cast and scale.
#include <cstring>
#include <type_traits>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/scale.h"
#include "kernels/cpu/vectors.h"

namespace zerocore::kernels::cpu {

namespace {

template <typename T>
void copy_bytes(const Segment& segment, bool streams) {
  const size_t nbytes = static_cast<size_t>(segment.numel) * sizeof(T);
  if (streams) {
    stream(segment.dst, segment.src, nbytes);
  } else {
    std::memcpy(segment.dst, segment.src, nbytes);
  }
}

template <typename Dst, typename Src>
void copy_segment(const Segment& segment, double scale, bool streams) {
  auto* dst = static_cast<Dst*>(segment.dst);
  const auto* src = static_cast<const Src*>(segment.src);
  const auto factor = static_cast<AccumulateType<Dst>>(scale);
  if (src == nullptr) {
    std::memset(segment.dst, 0, static_cast<size_t>(segment.numel) * sizeof(Dst));
  } else if (std::is_same_v<Dst, Src> && scale == 1.0 && !segment.add) {
    copy_bytes<Dst>(segment, streams);
  } else if (streams && !segment.add) {
    stream_blocks(dst, segment.numel, [&](Dst* values, int64_t begin, int64_t count) {
      scale_values(values, src + begin, count, factor, false);
    });
  } else {
    scale_values(dst, src, segment.numel, factor, segment.add);
  }
}

template <typename Dst, typename Src>
void copy_segments(const SegmentList& segments, double scale) {
  int64_t numel = 0;
  for (const Segment& segment : segments) {
    numel += segment.numel;
  }
  const bool streams = numel * static_cast<int64_t>(sizeof(Dst)) >= kStreamedNbytes;
  for (const Segment& segment : segments) {
    for_each_run(segment, [&](const Segment& run) { copy_segment<Dst, Src>(run, scale, streams); });
  }
  if (streams) {
    end_stream();
  }
}

} // namespace

void copy(const CopyCall& call) {
  if (call.pair.dst == Element::Byte) {
    copy_segments<uint8_t, uint8_t>(call.segments, 1.0);
    return;
  }
  visit(call.pair, [&](auto types) {
    using T = decltype(types);
    copy_segments<typename T::Dst, typename T::Src>(call.segments, call.scale);
  });
}

} // namespace zerocore::kernels::cpu
