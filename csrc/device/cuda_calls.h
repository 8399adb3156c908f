// The table through which other code calls CUDA's runtime, where zerocore is built with it.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>

namespace zerocore {

struct CudaCalls {
  // Pins pages of the host for all devices, which then copy from and to them by themselves. Throws
  // c10::Error.
  void (*pin)(void* data, size_t nbytes);
  // Never throws.
  void (*unpin)(void* data);
  // Whether the stream records a graph of its work.
  bool (*is_capturing)(const c10::Stream& stream);
};

// Null in a build without CUDA. Set once, when the library is loaded.
inline const CudaCalls*& cuda_calls() {
  static const CudaCalls* calls = nullptr;
  return calls;
}

} // namespace zerocore
