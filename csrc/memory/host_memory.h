// One mapping of host memory, of exactly the size that was planned, and tensors in it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>

#include "io/system_calls.h"

namespace zerocore {

struct HostMemoryOptions {
  int64_t nbytes = 0;
  // The first so many are pinned: a CUDA device copies from and to them while the host goes on.
  int64_t pinned_nbytes = 0;
  // Whether a child of a fork has a copy of what is not pinned, as of other memory. Not of memory
  // that a disk writes to: pages shared with a child are copied when either writes.
  bool inherited = false;
};

// Torch's own pinned blocks are rounded up to powers of two, and pinning one while a collective
// runs may wait for it: so there is one mapping, made while a model is sharded. Any thread.
class HostMemory : public std::enable_shared_from_this<HostMemory> {
 public:
  // Zeros, which take memory once they are touched, or at once where they are pinned. Throws
  // c10::Error if there is not enough, and for pinned bytes in a build without CUDA.
  static std::shared_ptr<HostMemory> map(const HostMemoryOptions& options);
  ~HostMemory();

  // 1-D, of the bytes from `offset` on; keeps the mapping. Throws c10::ValueError if they are not
  // within it, or `offset` is no multiple of an element.
  at::Tensor view(int64_t offset, int64_t numel, c10::ScalarType dtype);
  // The bytes from `offset` on as memory of tensors, which keeps the mapping.
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
