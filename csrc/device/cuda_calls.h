// The table through which code without CUDA headers calls CUDA's runtime.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>

namespace zerocore {

struct CudaCalls {
  // Pins host memory, so that every device copies from and to it asynchronously. Throws c10::Error.
  void (*pin)(void* data, size_t nbytes);
  // Unpins it. Never throws.
  void (*unpin)(void* data);
  // Returns whether the stream is being captured into a CUDA graph.
  bool (*is_capturing)(const c10::Stream& stream);
};

// Null in a build without CUDA. Set once, when the library is loaded.
inline const CudaCalls*& cuda_calls() {
  static const CudaCalls* calls = nullptr;
  return calls;
}

} // namespace zerocore
