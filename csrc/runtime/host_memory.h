// One mapping of host memory, of exactly the size that was planned, and tensors in it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace zerocore {

// Torch's own pinned blocks are rounded up to powers of two, and pinning one while a collective
// runs may wait for it: so there is one mapping, made while a model is sharded. Any thread.
class HostMemory : public std::enable_shared_from_this<HostMemory> {
 public:
  // Zeros, which take memory once they are touched, or at once if `pinned`. Pinned memory is copied
  // by a CUDA device while the host goes on. A child of a fork has no such memory. Throws
  // c10::Error if there is not enough, and for `pinned` in a build without CUDA.
  static std::shared_ptr<HostMemory> map(int64_t nbytes, bool pinned);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // 1-D, of the bytes from `offset` on; keeps the mapping. Throws c10::ValueError if they are not
  // within it, or `offset` is no multiple of an element.
  at::Tensor view(int64_t offset, int64_t numel, c10::ScalarType dtype);

  char* data() const { // begins on a page; null for zero bytes
    return data_;
  }
  int64_t nbytes() const {
    return nbytes_;
  }
  bool is_pinned() const {
    return is_pinned_;
  }

 private:
  explicit HostMemory(int64_t nbytes);

  char* data_ = nullptr;
  int64_t nbytes_;
  bool is_pinned_ = false;
};

} // namespace zerocore
