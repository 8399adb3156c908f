// The loops with which a device runs the kernels, and the table in which callers find them.
//
// Callers have checked the arguments. On CUDA, loops run on the current stream, and the host does
// not wait for the device.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "kernels/element.h"
#include "kernels/grad_norm.h"
#include "kernels/scaled.h"
#include "kernels/segment_list.h"

namespace zerocore::kernels {

// For every segment: dst = src * scale, dst += src * scale, or dst = 0.
struct CopyCall {
  c10::Device device;
  Pair pair;
  const SegmentList& segments;
  double scale;
};

// out = [out +] scale * (sum of the num_chunks equal parts of `chunks`, two or more); `out` has
// numel elements.
struct AccumulateCall {
  c10::Device device;
  Pair pair;
  void* out;
  const void* chunks;
  int64_t numel;
  int64_t num_chunks;
  double scale;
  bool add;
};

// partials[c] = the sums of chunk c of the sources.
struct SquareCall {
  c10::Device device;
  Element element;
  const SegmentList& segments;
  SquareSum* partials;
};

// *out = the sum of all partials, in a fixed order.
struct TotalCall {
  c10::Device device;
  const SquareSum* partials;
  int64_t num_partials;
  SquareSum* out;
};

// One step for all tensors. `corrections` has room for one entry per tensor.
struct AdamWCall {
  c10::Device device;
  AdamWTypes types;
  const AdamWList& tensors;
  const AdamWOptions& options;
  AdamWScalars scalars;
  BiasCorrection* corrections;
};

// Encodes the elements at `src` into `blocks`, see Note [Scaled blocks].
struct EncodeCall {
  c10::Device device;
  Element element; // of the source
  ScaledFormat format;
  void* blocks;
  const void* src;
  int64_t num_blocks;
};

// For every segment: dst = the decoded elements whose first byte is at `src`, within `blocks`.
struct DecodeCall {
  c10::Device device;
  Element element; // of the destinations
  ScaledFormat format;
  const SegmentList& segments;
  const void* blocks;
};

// Calls f<T, format>() for a float, half or bfloat16.
template <typename F>
void visit_scaled(Element element, ScaledFormat format, F&& f) {
  visit_narrow(element, [&](auto types) {
    using T = typename decltype(types)::Dst;
    if (format == ScaledFormat::Int8) {
      f.template operator()<T, ScaledFormat::Int8>();
    } else {
      f.template operator()<T, ScaledFormat::Float8>();
    }
  });
}

struct Loops {
  void (*copy)(const CopyCall&);
  void (*accumulate)(const AccumulateCall&);
  void (*square)(const SquareCall&);
  void (*total)(const TotalCall&);
  void (*adamw)(const AdamWCall&);
  void (*encode)(const EncodeCall&);
  void (*decode)(const DecodeCall&);
};

// Sets the loops of a device, once, before its first kernel.
bool register_loops(c10::DeviceType device, const Loops& loops);
bool has_loops(c10::DeviceType device);
// Returns the device's loops. Throws c10::NotImplementedError if this build has none for it.
const Loops& loops_of(c10::Device device);

} // namespace zerocore::kernels
