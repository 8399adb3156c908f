// The meta device: arguments are checked and nothing is computed.
#include "kernels/loops.h"

namespace zerocore::kernels {

namespace {

template <typename Call>
void nothing(const Call& /*call*/) {}

[[maybe_unused]] const bool registered = register_loops(
    c10::DeviceType::Meta,
    {&nothing<CopyCall>,
     &nothing<AccumulateCall>,
     &nothing<SquareCall>,
     &nothing<TotalCall>,
     &nothing<AdamWCall>});

} // namespace

} // namespace zerocore::kernels
