// The emulated link's clock on the device: what two small kernels do on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "emulation/device_timer.h"

namespace async_device {

const zerocore::DeviceTimer& link_timer();
// Nanoseconds for which the link was booked so far, in the order in which the streams came to it.
std::vector<int64_t> booked_durations();

} // namespace async_device
