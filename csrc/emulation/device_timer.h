// The table through which CUDA code, if built, passes its timer to the emulated link.
#pragma once

#include <cstdint>

namespace zerocore {

// Each launches one kernel on the current device's stream; pointers are to the device's memory.
struct DeviceTimer {
  // Books the link for `duration_ns`, from now or from `*link_free_at`, whichever is later. Writes
  // the end to `*link_free_at` and `*deadline` (nanoseconds of the device's clock).
  void (*book)(uint64_t* link_free_at, uint64_t* deadline, int64_t duration_ns);
  // Keeps `sms` multiprocessors busy until the deadline (0: one block of one thread).
  void (*hold)(const uint64_t* deadline, int sms);
};

// Null in a build without CUDA. Set once, when the library is loaded.
inline const DeviceTimer*& device_timer() {
  static const DeviceTimer* timer = nullptr;
  return timer;
}

} // namespace zerocore
