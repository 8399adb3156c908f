// zerocore's kernels on the device.
#pragma once

#include "kernels/loops.h"

namespace async_device {

// Returns loops that call torch's operators, which order themselves on the device's streams.
const zerocore::kernels::Loops& operator_loops();

} // namespace async_device
