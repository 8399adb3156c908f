// Checks the kernels' arguments, and gives raw access to tensors' memory. Errors name the operator
// and the argument.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <type_traits>

#include "kernels/element.h"

namespace zerocore::kernels {

// The conversion of values of dtype `src` to `dst`. A complex element counts as two real ones. With
// `moves_only`, a dtype that kernels cannot compute with is moved as bytes. conversion() throws
// TypeError for any other pair.
struct Conversion {
  Pair pair;
  int64_t step = 1; // elements of `pair` for each element of the tensors
};
Conversion conversion(const char* op, c10::ScalarType dst, c10::ScalarType src, bool moves_only);

// Throws ValueError unless the tensor is a flat buffer: 1-D and contiguous.
void check_flat(const char* op, const char* name, const at::Tensor& tensor);

// Throw the error of a failed check. The checks are inline, because they run for every tensor.
[[noreturn]] void fail_member(
    const char* op,
    const char* name,
    size_t index,
    const at::Tensor& tensor,
    const at::Tensor& like,
    c10::ScalarType dtype);
[[noreturn]] void fail_range(
    const char* op,
    size_t index,
    int64_t offset,
    int64_t numel,
    int64_t size);

// Throws unless tensor `index` of a list is on `like`'s device, of `dtype`, and dense in memory.
inline void check_member(
    const char* op,
    const char* name,
    size_t index,
    const at::Tensor& tensor,
    const at::Tensor& like,
    c10::ScalarType dtype) {
  const bool fits = tensor.scalar_type() == dtype && tensor.device() == like.device() &&
      tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense();
  if (C10_UNLIKELY(!fits)) {
    fail_member(op, name, index, tensor, like, dtype);
  }
}

// Throws unless [offset, offset + numel) lies in [0, size).
inline void check_range(const char* op, size_t index, int64_t offset, int64_t numel, int64_t size) {
  if (C10_UNLIKELY(offset < 0 || numel < 0 || numel > size || offset > size - numel)) {
    fail_range(op, index, offset, numel, size);
  }
}

// Throws unless the lists `name` and `of` have equal lengths.
void check_count(const char* op, const char* name, size_t given, const char* of, size_t wanted);

// A tensor's memory without a type, to write or to read; null on the meta device.
template <typename Byte>
struct TensorMemory {
  explicit TensorMemory(const at::Tensor& tensor)
      : itemsize(static_cast<int64_t>(tensor.itemsize())) {
    if (tensor.is_meta()) {
      return;
    }
    if constexpr (std::is_const_v<Byte>) {
      data = static_cast<Byte*>(tensor.const_data_ptr());
    } else {
      data = static_cast<Byte*>(tensor.data_ptr());
    }
  }

  Byte* at(int64_t index) const {
    return data == nullptr ? nullptr : data + index * itemsize;
  }

  Byte* data = nullptr;
  int64_t itemsize;
};
using Memory = TensorMemory<char>;
using Source = TensorMemory<const char>;

} // namespace zerocore::kernels
