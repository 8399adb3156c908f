// A tensor's memory without a type, to write and to read. On the meta device there is none: null.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zerocore::kernels {

struct Memory {
  explicit Memory(const at::Tensor& tensor)
      : data(tensor.is_meta() ? nullptr : static_cast<char*>(tensor.data_ptr())),
        itemsize(static_cast<int64_t>(tensor.itemsize())) {}

  char* at(int64_t index) const {
    return data == nullptr ? nullptr : data + index * itemsize;
  }

  char* data;
  int64_t itemsize;
};

// The same to read from.
struct Source {
  explicit Source(const at::Tensor& tensor)
      : data(tensor.is_meta() ? nullptr : static_cast<const char*>(tensor.const_data_ptr())),
        itemsize(static_cast<int64_t>(tensor.itemsize())) {}

  const char* at(int64_t index) const {
    return data == nullptr ? nullptr : data + index * itemsize;
  }

  const char* data;
  int64_t itemsize;
};

} // namespace zerocore::kernels
