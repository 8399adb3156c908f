// One mapping of host memory, of exactly the planned size, and tensors in it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>

#include "io/system_calls.h"

namespace zerocore {

struct HostMemoryOptions {
  int64_t nbytes = 0;
  // This many bytes at the front are pinned: a CUDA device copies from and to them while the host
  // goes on.
  int64_t pinned_nbytes = 0;
  // Whether a forked child inherits the bytes that are not pinned, like other memory. False for
  // memory that a disk writes to: writing to a page that is shared with a child copies it.
  bool inherited = false;
};

// Torch rounds pinned blocks up to powers of two, and pinning one may wait for a running
// collective. So sharding a model makes one mapping, pinned once. Any thread may call it.
class HostMemory : public std::enable_shared_from_this<HostMemory> {
 public:
  // Maps zeros; pinned bytes take memory at once, others when they are touched. Throws c10::Error
  // if there is not enough, and for pinned bytes in a build without CUDA.
  static std::shared_ptr<HostMemory> map(const HostMemoryOptions& options);
  ~HostMemory();

  // Returns a 1-D tensor of the bytes from `offset` on, which keeps the mapping. Throws
  // c10::ValueError if it would exceed the mapping, or `offset` is not a multiple of the element's
  // size.
  at::Tensor view(int64_t offset, int64_t numel, c10::ScalarType dtype);
  // Returns the bytes from `offset` on as memory for tensors, which keeps the mapping.
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
