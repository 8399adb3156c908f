// Where layers write gradients in a backward, see Note [Gradients in place].
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

#include "engine/unit/unit.h"

namespace zerocore {

class GradPlaces {
 public:
  explicit GradPlaces(const Units& units);

  // A unit's bucket is ready for work of the stream.
  void open(const std::optional<c10::Stream>& stream) {
    stream_ = stream;
  }
  // The parameter's elements of `bucket` (1-D, of its region), of its shape; undefined where its
  // gradient does not fit or is not the first since take_back().
  at::Tensor give(const Unit& unit, int param, const at::Tensor& bucket);
  // The unit's bucket is going to be something else: a tensor that was given, is still used and is
  // no gradient yet (autograd waits for others to add, of later calls) gets memory of its own.
  void take_back(const Unit& unit);

 private:
  using Given = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  std::vector<std::vector<std::optional<Given>>> given_; // by unit and parameter
  std::optional<c10::Stream> stream_;
};

} // namespace zerocore
