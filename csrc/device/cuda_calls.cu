// Fills the table with CUDA's functions when the library is loaded.
#include "device/cuda_calls.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace zerocore {

namespace {

void pin(void* data, size_t nbytes) {
  C10_CUDA_CHECK(cudaHostRegister(data, nbytes, cudaHostRegisterPortable));
}

void unpin(void* data) {
  C10_CUDA_CHECK_WARN(cudaHostUnregister(data));
}

bool is_capturing(const c10::Stream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::CUDAStream(stream), &status));
  return status != cudaStreamCaptureStatusNone;
}

constexpr CudaCalls kCalls{&pin, &unpin, &is_capturing};

[[maybe_unused]] const bool registered = [] {
  cuda_calls() = &kCalls;
  return true;
}();

} // namespace

} // namespace zerocore
