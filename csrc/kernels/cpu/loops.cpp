// Registers the CPU's loops.
#include "kernels/cpu/loops.h"

namespace zerocore::kernels::cpu {

namespace {

[[maybe_unused]] const bool registered =
    register_loops(c10::DeviceType::CPU, {&copy, &accumulate, &square, &total, &adamw});

} // namespace

} // namespace zerocore::kernels::cpu
