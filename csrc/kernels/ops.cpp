// Typed callers of the kernels. Devices without a loop of ours go through ATen.
#include "kernels/ops.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/as_strided.h>

#include "kernels/flatten.h"

namespace zerocore::kernels {

namespace {

// The elements of a dense tensor in storage order.
at::Tensor flattened(const at::Tensor& tensor, int64_t offset, int64_t numel) {
  return at::as_strided(tensor, {numel}, {1}, tensor.storage_offset() + offset);
}

template <typename T>
void pack_cpu(T* bucket, const std::vector<PackSegment>& segments, double scale) {
  for (const PackSegment& segment : segments) {
    T* dst = bucket + segment.offset;
    if (segment.source == nullptr) {
      if (!segment.add) {
        std::memset(static_cast<void*>(dst), 0, static_cast<size_t>(segment.numel) * sizeof(T));
      }
      continue;
    }
    const T* src = segment.source->const_data_ptr<T>() + segment.source_offset;
    if (segment.add) {
      scale_add(dst, src, segment.numel, scale);
    } else {
      scale_into(dst, src, segment.numel, scale);
    }
  }
}

void pack_aten(const at::Tensor& bucket, const PackSegment& segment, double scale) {
  const at::Tensor dst = bucket.narrow(0, segment.offset, segment.numel);
  if (segment.source == nullptr) {
    if (!segment.add) {
      dst.zero_();
    }
    return;
  }
  const at::Tensor src = flattened(*segment.source, segment.source_offset, segment.numel);
  if (segment.add) {
    dst.add_(src, scale);
  } else {
    dst.copy_(src).mul_(scale);
  }
}

} // namespace

void pack(const at::Tensor& bucket, const std::vector<PackSegment>& segments, double scale) {
  if (!bucket.is_cpu()) {
    for (const PackSegment& segment : segments) {
      pack_aten(bucket, segment, scale);
    }
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, bucket.scalar_type(), "zerocore_pack", [&] {
        pack_cpu<scalar_t>(bucket.data_ptr<scalar_t>(), segments, scale);
      });
}

void sum_chunks(const at::Tensor& out, const at::Tensor& chunks, int64_t num_chunks, bool add) {
  if (!out.is_cpu()) {
    const at::Tensor sum = chunks.view({num_chunks, -1}).sum(0);
    add ? out.add_(sum) : out.copy_(sum);
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, out.scalar_type(), "zerocore_sum_chunks", [&] {
        sum_chunks<scalar_t>(
            out.data_ptr<scalar_t>(),
            chunks.const_data_ptr<scalar_t>(),
            out.numel(),
            num_chunks,
            add);
      });
}

} // namespace zerocore::kernels
