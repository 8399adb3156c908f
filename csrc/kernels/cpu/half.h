// Loops over float16 with the processor's own casts.
//
// Note [Casts of float16]
// x86 has casted float16 in hardware since 2012, but a compiler makes no vectors of them out of a
// loop over c10::Half, whose casts are integer arithmetic for processors without. These loops do.
// Each works on as many elements as fill vectors and returns their number, none where the
// processor has no such casts; the rest is for a plain loop, which rounds in the same way.
#pragma once

#include <c10/util/Half.h>

#include <cstdint>

namespace zerocore::kernels::cpu {

// dst[i] = or += src[i] * factor, from or to float16; the other type is float16 or float32.
template <typename Dst, typename Src>
int64_t scale_halves(Dst* dst, const Src* src, int64_t numel, float factor, bool add);

// Adds the squares of src to `sum`.
int64_t square_halves(const c10::Half* src, int64_t numel, double& sum);

} // namespace zerocore::kernels::cpu
