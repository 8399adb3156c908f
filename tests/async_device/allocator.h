// A caching allocator by stream that poisons what is freed.
//
// Note [Poison]
// Memory that is freed is filled with bytes that are NaN in every floating type, on the stream that
// it was allocated on and behind what that stream was given. Its next user on that stream comes
// behind, as with CUDA's allocator. A reader that comes later, or on another stream without an
// event or record_stream, computes with NaN.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace async_device {

constexpr int kPoison = 0xFF;

c10::DeviceAllocator& allocator();
void record_stream(const c10::DataPtr& data, int stream);

} // namespace async_device
