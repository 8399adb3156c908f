// Tensors that count what a program writes through their `.data`.
//
// Note [Writes through data]
// `.data` has a version counter of its own: autograd is not told of such writes, and a backward
// computes with the new values. All `.data` of a counted tensor share one counter, which the engine
// reads. Views of `.data` share it, too, and so does `.data` of a view: views share the version
// counter of their base, and by that its counter of writes through `.data` is found.
#pragma once

#include <ATen/core/Tensor.h>

namespace zerocore {

// A new leaf on the memory of `tensor`. It has its own version counter, and counts writes through
// its `.data`.
at::Tensor counted(const at::Tensor& tensor);
// A tensor with the shape and strides of `view` on the memory of `leaf`, a result of counted().
// Writes to it count as writes to `leaf`.
at::Tensor counted_view(const at::Tensor& leaf, const at::Tensor& view);
// The counter of writes through `tensor.data`. Not enabled if `tensor` is no result of counted().
c10::VariableVersion data_counter(const at::Tensor& tensor);
// Writes to `alias` count as those through the `.data` of `tensor`.
void count_as_data(const at::Tensor& tensor, const at::Tensor& alias);
// Writes to `alias`, the `.data` of a view of a result of counted(), count as those through its
// base's. Nothing if `view` is none.
void count_view_as_data(const at::Tensor& view, const at::Tensor& alias);

inline int64_t num_writes(const c10::VariableVersion& counter) {
  return counter.enabled() ? counter.current_version() : 0;
}

} // namespace zerocore
