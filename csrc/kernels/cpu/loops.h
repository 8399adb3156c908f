// The CPU's loops.
#pragma once

#include "kernels/loops.h"

namespace zerocore::kernels::cpu {

void copy(const CopyCall& call);
void accumulate(const AccumulateCall& call);
void square(const SquareCall& call);
void total(const TotalCall& call);
void adamw(const AdamWCall& call);

} // namespace zerocore::kernels::cpu
