#include "kernels/checks.h"

namespace zerocore::kernels {

Conversion conversion(const char* op, c10::ScalarType dst, c10::ScalarType src, bool moves_only) {
  if (can_cast({dst, src})) {
    return {{dst, src}, 1};
  }
  if (dst == src && (dst == at::kComplexFloat || dst == at::kComplexDouble)) {
    const Element real = c10::toRealValueType(dst);
    return {{real, real}, 2};
  }
  TORCH_CHECK_TYPE(
      moves_only && dst == src,
      op,
      ": cannot convert ",
      src,
      " to ",
      dst,
      ". It casts among float32, float16 and bfloat16",
      moves_only ? "; it only moves other dtypes."
                 : ", or float64 and complex numbers to their own dtype.");
  return {{Element::Byte, Element::Byte}, static_cast<int64_t>(c10::elementSize(dst))};
}

void check_flat(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.dim() == 1 && tensor.is_contiguous(),
      op,
      ": ",
      name,
      " must be a contiguous 1-D tensor, got sizes ",
      tensor.sizes(),
      " and strides ",
      tensor.strides());
}

void fail_member(
    const char* op,
    const char* name,
    size_t index,
    const at::Tensor& tensor,
    const at::Tensor& like,
    c10::ScalarType dtype) {
  const auto who = c10::str(op, ": ", name, " ", index, " ");
  TORCH_CHECK_VALUE(
      tensor.device() == like.device(),
      who,
      "is on ",
      tensor.device(),
      ", expected ",
      like.device());
  TORCH_CHECK_TYPE(
      tensor.scalar_type() == dtype,
      who,
      "is ",
      tensor.scalar_type(),
      ", expected ",
      dtype,
      " like the others. Call it once for each dtype.");
  TORCH_CHECK_VALUE(
      false, who, "must be dense without gaps or repeated elements. Pass .contiguous().");
}

void check_count(const char* op, const char* name, size_t given, const char* of, size_t wanted) {
  TORCH_CHECK_VALUE(
      given == wanted,
      op,
      ": got ",
      given,
      " ",
      name,
      " for ",
      wanted,
      " ",
      of,
      ", expected as many");
}

void fail_range(const char* op, size_t index, int64_t offset, int64_t numel, int64_t size) {
  TORCH_CHECK_VALUE(
      false,
      op,
      ": piece ",
      index,
      " is [",
      offset,
      ", ",
      offset + numel,
      "), expected within the ",
      size,
      " elements of the tensor");
}

} // namespace zerocore::kernels
