// Pins pages of host memory for all CUDA devices of the process.
#include "runtime/page_pinning.h"

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

namespace zerocore {

namespace {

void pin(void* data, size_t nbytes) {
  C10_CUDA_CHECK(cudaHostRegister(data, nbytes, cudaHostRegisterPortable));
}

void unpin(void* data) {
  C10_CUDA_CHECK_WARN(cudaHostUnregister(data));
}

constexpr PagePinning kPinning{&pin, &unpin};

[[maybe_unused]] const bool registered = [] {
  page_pinning() = &kPinning;
  return true;
}();

} // namespace

} // namespace zerocore
