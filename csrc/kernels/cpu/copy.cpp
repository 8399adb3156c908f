// Moves segments on the CPU, with cast and scale.
#include <cstring>
#include <type_traits>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/scale.h"

namespace zerocore::kernels::cpu {

namespace {

template <typename Dst, typename Src>
void copy_segment(const Segment& segment, double scale) {
  auto* dst = static_cast<Dst*>(segment.dst);
  const auto* src = static_cast<const Src*>(segment.src);
  const auto factor = static_cast<AccumulateType<Dst>>(scale);
  if (src == nullptr) {
    std::memset(segment.dst, 0, static_cast<size_t>(segment.numel) * sizeof(Dst));
  } else if (std::is_same_v<Dst, Src> && scale == 1.0 && !segment.add) {
    std::memcpy(segment.dst, segment.src, static_cast<size_t>(segment.numel) * sizeof(Dst));
  } else {
    scale_values(dst, src, segment.numel, factor, segment.add);
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
