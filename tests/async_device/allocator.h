// A caching allocator by stream that poisons freed memory.
//
// Note [Poison]
// Freed memory is filled with bytes that are NaN in every floating type. The stream that it was
// allocated on does so after its work so far. The next user on that stream comes after, as with
// CUDA's allocator. A later reader, or one on another stream without an event or record_stream,
// computes with NaN.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace async_device {

constexpr int kPoison = 0xFF;

c10::DeviceAllocator& allocator();
void record_stream(const c10::DataPtr& data, int stream);

} // namespace async_device
