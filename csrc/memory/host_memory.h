// One mapping of host memory, of exactly the planned size, and tensors over it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>

#include "io/system_calls.h"

namespace zerocore {

struct HostMemoryOptions {
  int64_t nbytes = 0;
  // The bytes at the front that are pinned: a CUDA device copies from and to them asynchronously.
  int64_t pinned_nbytes = 0;
  // Whether a forked child inherits the bytes that are not pinned, like other memory. False for
  // memory that a disk writes to: a write to a page that a child shares copies the page.
  bool inherited = false;
};

// Torch rounds pinned blocks up to powers of two, and pinning one may wait for a running
// collective. So sharding a model makes one mapping and pins it once. Thread-safe.
class HostMemory : public std::enable_shared_from_this<HostMemory> {
 public:
  // Maps zeros. Pinned bytes take memory at once, others at their first access. Throws c10::Error
  // if there is too little memory, and for pinned bytes in a build without CUDA.
  static std::shared_ptr<HostMemory> map(const HostMemoryOptions& options);
  ~HostMemory();

  // Returns a 1-D tensor of the bytes from `offset` on, which keeps the mapping alive. Throws
  // c10::ValueError if the tensor would exceed the mapping, or `offset` is not a multiple of the
  // element's size.
  at::Tensor view(int64_t offset, int64_t numel, c10::ScalarType dtype);
  // Returns the bytes from `offset` on as memory for tensors, which keeps the mapping alive.
  c10::DataPtr at(int64_t offset);

  char* data() const { // begins on a page; null for zero bytes
    return mapping_.data();
  }
  int64_t nbytes() const {
    return nbytes_;
  }
  int64_t pinned_nbytes() const {
    return pinned_nbytes_;
  }

 private:
  explicit HostMemory(const HostMemoryOptions& options);

  int64_t nbytes_;
  int64_t pinned_nbytes_ = 0;
  io::Mapping mapping_;
};

} // namespace zerocore
