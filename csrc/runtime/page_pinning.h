// The table through which CUDA code, where it is built, pins pages of host memory.
#pragma once

#include <cstddef>

namespace zerocore {

struct PagePinning {
  // So that a device of CUDA copies from and to them by itself. Throws c10::Error.
  void (*pin)(void* data, size_t nbytes);
  // Never throws.
  void (*unpin)(void* data);
};

// Null in a build without CUDA. Set once, when the library is loaded.
inline const PagePinning*& page_pinning() {
  static const PagePinning* pinning = nullptr;
  return pinning;
}

} // namespace zerocore
