// Builds zerocore's kernels from torch's operators. The optimizers' kernels are operators of
// zerocore, which reach the device as torch's do.
#include "operator_loops.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <cfloat>
#include <utility>

#include "common/math.h"

namespace async_device {

namespace {

using namespace zerocore;
using namespace zerocore::kernels;

at::Tensor tensor_at(const void* data, int64_t numel, Element element, c10::Device device) {
  const auto options = at::TensorOptions().dtype(element).device(device);
  return at::for_blob(const_cast<void*>(data), {numel})
      .options(options)
      .target_device(device)
      .make_tensor();
}

// Casts to the type in which values for `element` are computed.
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

void copy_run(const CopyCall& call, const Segment& run) {
  const auto [dst, src] = call.pair;
  at::Tensor out = tensor_at(run.dst, run.numel, dst, call.device);
  if (run.src == nullptr) {
    out.zero_();
    return;
  }
  const at::Tensor from = tensor_at(run.src, run.numel, src, call.device);
  if (dst == Element::Byte) {
    out.copy_(from);
  } else {
    write(out, widened(from, dst), call.scale, run.add, dst);
  }
}

void copy_by_operators(const CopyCall& call) {
  for (const Segment& segment : call.segments) {
    for_each_run(segment, [&](const Segment& run) { copy_run(call, run); });
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

Element number_type(ScaledFormat format) {
  return format == ScaledFormat::Int8 ? Element::Char : Element::Float8_e4m3fn;
}

// Returns views of the blocks' numbers and of their scales.
std::pair<at::Tensor, at::Tensor> parts_of(const at::Tensor& blocks, ScaledFormat format) {
  const at::Tensor rows = blocks.view({-1, kScaledNbytes});
  const at::Tensor numbers = rows.narrow(1, 0, kScaledNumel).view(number_type(format));
  return {numbers, rows.narrow(1, kScaledNumel, kScaledNbytes - kScaledNumel).view(Element::Float)};
}

void encode_by_operators(const EncodeCall& call) {
  const at::Tensor blocks =
      tensor_at(call.blocks, call.num_blocks * kScaledNbytes, Element::Byte, call.device);
  const at::Tensor values =
      tensor_at(call.src, call.num_blocks * kScaledNumel, call.element, call.device)
          .to(Element::Float)
          .view({-1, kScaledNumel});
  at::Tensor scale = values.abs().amax(1, /*keepdim=*/true).div(largest_number(call.format));
  scale = scale.masked_fill(scale.lt(FLT_MIN), 0);
  at::Tensor scaled = values.mul(scale.reciprocal().masked_fill(scale.eq(0), 0));
  if (call.format == ScaledFormat::Int8) {
    scaled = scaled.round();
  }
  auto [numbers, scales] = parts_of(blocks, call.format);
  numbers.copy_(scaled);
  scales.copy_(scale);
}

void decode_run(const DecodeCall& call, const Segment& run) {
  const auto* begin = static_cast<const char*>(call.blocks);
  const int64_t past = static_cast<const char*>(run.src) - begin;
  const int64_t first = past % kScaledNbytes;
  const int64_t num_blocks = ceil_div(first + run.numel, kScaledNumel);
  const at::Tensor blocks =
      tensor_at(begin + past - first, num_blocks * kScaledNbytes, Element::Byte, call.device);
  const auto [numbers, scales] = parts_of(blocks, call.format);
  const at::Tensor values = numbers.to(Element::Float).mul(scales).view({-1});
  tensor_at(run.dst, run.numel, call.element, call.device)
      .copy_(values.narrow(0, first, run.numel));
}

void decode_by_operators(const DecodeCall& call) {
  for (const Segment& segment : call.segments) {
    for_each_run(segment, [&](const Segment& run) { decode_run(call, run); });
  }
}

template <typename Call>
void refuse(const Call& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "zerocore's optimizers have no kernel for ", call.device);
}

} // namespace

const Loops& operator_loops() {
  static constexpr Loops loops{
      &copy_by_operators,
      &accumulate_by_operators,
      &refuse<SquareCall>,
      &refuse<TotalCall>,
      &refuse<AdamWCall>,
      &encode_by_operators,
      &decode_by_operators};
  return loops;
}

} // namespace async_device
