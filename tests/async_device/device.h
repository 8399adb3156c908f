// The one device of the process.
#pragma once

#include <c10/core/Device.h>

namespace async_device {

constexpr auto kType = c10::DeviceType::PrivateUse1;
inline const c10::Device kDevice(kType, 0);

} // namespace async_device
