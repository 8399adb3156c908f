// Typed callers of the kernels: pick the element type and the device's loop.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace zerocore::kernels {

// One contiguous piece of work of a pack. Without a source the destination is zeroed (or left
// alone when adding).
struct PackSegment {
  const at::Tensor* source = nullptr; // dense; read in storage order
  int64_t source_offset = 0; // elements
  int64_t offset = 0; // elements in the bucket
  int64_t numel = 0;
  bool add = false; // add to what the bucket holds
};

// bucket[segment] = or += source * scale, for every segment. `bucket` is 1-D of a floating dtype;
// sources have its dtype and device.
void pack(const at::Tensor& bucket, const std::vector<PackSegment>& segments, double scale);

// out = [out +] sum of the `num_chunks` equal parts of `chunks`. 1-D, same dtype and device.
void sum_chunks(const at::Tensor& out, const at::Tensor& chunks, int64_t num_chunks, bool add);

} // namespace zerocore::kernels
