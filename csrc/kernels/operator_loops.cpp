// The device that others add to torch (PrivateUse1): its loops are torch's operators.
//
// They order themselves on its streams as its operators do. A library that gives such a device to
// torch gives it operators, too; ours for optimizers reach it as torch's do, so they need no loops.
#include "kernels/loops.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

namespace zerocore::kernels {

namespace {

at::Tensor tensor_at(const void* data, int64_t numel, Element element, c10::Device device) {
  const auto options = at::TensorOptions().dtype(element).device(device);
  return at::for_blob(const_cast<void*>(data), {numel})
      .options(options)
      .target_device(device)
      .make_tensor();
}

// In the type that values on their way to `element` are computed in.
at::Tensor widened(const at::Tensor& tensor, Element element) {
  return tensor.to(element == Element::Double ? c10::ScalarType::Double : c10::ScalarType::Float);
}

// out = [out +] value * scale, rounded once.
void write(at::Tensor out, at::Tensor value, double scale, bool add, Element element) {
  if (scale != 1.0) {
    value = value.mul(scale);
  }
  out.copy_(add ? widened(out, element).add(value) : value);
}

void copy_by_operators(const CopyCall& call) {
  const auto [dst, src] = call.pair;
  for (const Segment& segment : call.segments) {
    at::Tensor out = tensor_at(segment.dst, segment.numel, dst, call.device);
    if (segment.src == nullptr) {
      out.zero_();
      continue;
    }
    const at::Tensor from = tensor_at(segment.src, segment.numel, src, call.device);
    if (dst == Element::Byte) {
      out.copy_(from);
    } else {
      write(out, widened(from, dst), call.scale, segment.add, dst);
    }
  }
}

void accumulate_by_operators(const AccumulateCall& call) {
  const auto [dst, src] = call.pair;
  const at::Tensor chunks = tensor_at(call.chunks, call.numel * call.num_chunks, src, call.device);
  at::Tensor sum = widened(chunks.narrow(0, 0, call.numel), dst);
  for (int64_t chunk = 1; chunk < call.num_chunks; ++chunk) {
    sum = sum.add(widened(chunks.narrow(0, chunk * call.numel, call.numel), dst));
  }
  write(tensor_at(call.out, call.numel, dst, call.device), sum, call.scale, call.add, dst);
}

template <typename Call>
void refuse(const Call& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "zerocore's optimizers have no kernel for ", call.device);
}

[[maybe_unused]] const bool has_operators = register_loops(
    c10::DeviceType::PrivateUse1,
    {&copy_by_operators,
     &accumulate_by_operators,
     &refuse<SquareCall>,
     &refuse<TotalCall>,
     &refuse<AdamWCall>});

} // namespace

} // namespace zerocore::kernels
