// Moves segments on the CPU, with cast and scale.
#include <cstring>
#include <type_traits>

#include "kernels/cpu/clones.h"
#include "kernels/cpu/loops.h"
#include "kernels/flatten.h"

namespace zerocore::kernels::cpu {

namespace {

template <typename Dst, typename Src>
ZEROCORE_CPU_CLONES void scale_into(
    Dst* __restrict dst,
    const Src* __restrict src,
    int64_t numel,
    AccumulateType<Dst> factor) {
  for (int64_t i = 0; i < numel; ++i) {
    dst[i] = scaled<Dst>(src[i], factor);
  }
}

template <typename Dst, typename Src>
ZEROCORE_CPU_CLONES void scale_add(
    Dst* __restrict dst,
    const Src* __restrict src,
    int64_t numel,
    AccumulateType<Dst> factor) {
  for (int64_t i = 0; i < numel; ++i) {
    dst[i] = scaled_sum(dst[i], src[i], factor);
  }
}

template <typename Dst, typename Src>
void copy_segment(const Segment& segment, double scale) {
  auto* dst = static_cast<Dst*>(segment.dst);
  const auto* src = static_cast<const Src*>(segment.src);
  const auto factor = static_cast<AccumulateType<Dst>>(scale);
  if (src == nullptr) {
    std::memset(segment.dst, 0, static_cast<size_t>(segment.numel) * sizeof(Dst));
  } else if (segment.add) {
    scale_add(dst, src, segment.numel, factor);
  } else if (std::is_same_v<Dst, Src> && scale == 1.0) {
    std::memcpy(segment.dst, segment.src, static_cast<size_t>(segment.numel) * sizeof(Dst));
  } else {
    scale_into(dst, src, segment.numel, factor);
  }
}

} // namespace

void copy(const CopyCall& call) {
  if (call.pair.dst == Element::Byte) {
    for (const Segment& segment : call.segments) {
      copy_segment<uint8_t, uint8_t>(segment, 1.0);
    }
    return;
  }
  visit(call.pair, [&](auto types) {
    using T = decltype(types);
    for (const Segment& segment : call.segments) {
      copy_segment<typename T::Dst, typename T::Src>(segment, call.scale);
    }
  });
}

} // namespace zerocore::kernels::cpu
