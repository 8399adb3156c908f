// Registers the CUDA launchers.
#include "kernels/cuda/loops.h"

namespace zerocore::kernels::cuda {

namespace {

[[maybe_unused]] const bool registered = register_loops(
    c10::DeviceType::CUDA,
    {&copy, &accumulate, &square, &total, &adamw, &encode, &decode});

} // namespace

} // namespace zerocore::kernels::cuda
