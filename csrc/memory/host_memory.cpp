// Advises the system on the mapping's pages, and pins them.
#include "memory/host_memory.h"

#include <ATen/ops/from_blob.h>

#include <cerrno>
#include <cstring>

#include "device/cuda_calls.h"
#include "memory/bucket.h"

namespace zerocore {

namespace {

// The system may not know these hints, and nothing depends on them.
void advise([[maybe_unused]] void* data, [[maybe_unused]] const HostMemoryOptions& options) {
#ifdef __linux__
  // With pages of 4 KiB, a pass over gigabytes spends its time on page lookups.
  ::madvise(data, static_cast<size_t>(options.nbytes), MADV_HUGEPAGE);
  // After a fork (a data loader's worker), the first process that writes to a shared page gets a
  // copy. The device or the disk would still use the child's page.
  const int64_t apart = options.inherited ? options.pinned_nbytes : options.nbytes;
  if (apart > 0) {
    ::madvise(data, static_cast<size_t>(apart), MADV_DONTFORK);
  }
#endif
}

} // namespace

HostMemory::HostMemory(const HostMemoryOptions& options)
    : nbytes_(options.nbytes), mapping_(static_cast<size_t>(options.nbytes)) {
  TORCH_CHECK(
      nbytes_ == 0 || data() != nullptr,
      "cannot map ",
      nbytes_,
      " bytes of host memory: ",
      std::strerror(errno),
      ". Is there a limit on this process (ulimit -v, ulimit -d)?");
  if (nbytes_ > 0) {
    advise(data(), options);
  }
  if (options.pinned_nbytes > 0) {
    TORCH_CHECK(cuda_calls() != nullptr, "pinned host memory needs a build with CUDA");
    cuda_calls()->pin(data(), static_cast<size_t>(options.pinned_nbytes));
    pinned_nbytes_ = options.pinned_nbytes;
  }
}

HostMemory::~HostMemory() {
  if (pinned_nbytes_ > 0) {
    cuda_calls()->unpin(data());
  }
}

std::shared_ptr<HostMemory> HostMemory::map(const HostMemoryOptions& options) {
  TORCH_CHECK_VALUE(
      options.nbytes >= 0, "host memory: expected 0 bytes or more, got ", options.nbytes);
  TORCH_CHECK_VALUE(
      options.pinned_nbytes >= 0 && options.pinned_nbytes <= options.nbytes,
      "host memory of ",
      options.nbytes,
      " bytes: ",
      options.pinned_nbytes,
      " of them cannot be pinned");
  return std::shared_ptr<HostMemory>(new HostMemory(options));
}

c10::DataPtr HostMemory::at(int64_t offset) {
  return kept_memory(shared_from_this(), data() + offset);
}

at::Tensor HostMemory::view(int64_t offset, int64_t numel, c10::ScalarType dtype) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  TORCH_CHECK_VALUE(
      offset >= 0 && numel >= 0 && offset % itemsize == 0 && offset <= nbytes_ &&
          numel <= (nbytes_ - offset) / itemsize,
      "host memory of ",
      nbytes_,
      " bytes has no view of ",
      numel,
      " elements of ",
      dtype,
      " at byte ",
      offset);
  auto keep = [memory = shared_from_this()](void*) {};
  return at::from_blob(data() + offset, {numel}, keep, at::TensorOptions().dtype(dtype));
}

} // namespace zerocore
