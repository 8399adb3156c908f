// The emulated link's timer on the device, which on a GPU is two small kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "emulation/device_timer.h"

namespace async_device {

const zerocore::DeviceTimer& link_timer();
// Returns the nanoseconds of each booking so far, in the order in which the streams came to the
// link.
std::vector<int64_t> booked_durations();

} // namespace async_device
