// Writes the result of a collective whose peers all mirror this rank: they send what it sends.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zerocore {

// How N equal values combine: into the value itself (average, minimum, maximum, bitwise and, or)
// or a multiple of it (sum). Zero is what a mirror does not send.
struct Combination {
  enum class Kind : uint8_t { Copy, Scale, Zero };

  Kind kind = Kind::Copy;
  double factor = 1.0; // of Scale
};

// `to` becomes the combination of N times `from`; the two may be the same memory, but not overlap
// otherwise. One shape, dtype and device.
struct Move {
  at::Tensor to;
  at::Tensor from;
  Combination combination;
};

// A tensor over the same memory as it is now: it keeps the storage alive, but does not follow it
// when it is pointed elsewhere, and belongs to no Python object.
at::Tensor alias_storage(const at::Tensor& tensor);

// On the CPU in one thread, on a GPU on the current stream.
void carry_out(const Move& move);

} // namespace zerocore
