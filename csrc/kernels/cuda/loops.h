// The CUDA launchers; each runs on the current stream of the call's device.
#pragma once

#include "kernels/loops.h"

namespace zerocore::kernels::cuda {

void copy(const CopyCall& call);
void accumulate(const AccumulateCall& call);
void square(const SquareCall& call);
void total(const TotalCall& call);
void adamw(const AdamWCall& call);
void encode(const EncodeCall& call);
void decode(const DecodeCall& call);

} // namespace zerocore::kernels::cuda
