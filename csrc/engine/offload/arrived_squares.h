// Sums of squares of a unit's gradients on the host, taken as they arrive.
//
// They are kept chunk by chunk: whoever adds them in the order of all parameters gets the bits of a
// sum over the gradients themselves.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "plan/layout.h"

namespace zerocore {

class ArrivedSquares {
 public:
  // `layout` outlives it; `shard` is this rank's.
  ArrivedSquares(const Layout& layout, int64_t shard);

  // The work of another thread once `gradient`, this rank's part of a region, 1-D, has come. From
  // here on the region's squares are known.
  std::function<void()> take(int region, const at::Tensor& gradient);
  void forget();
  bool has(int region) const {
    return is_known_[region];
  }
  // Those of a parameter, of a region that has() them: see kernels::squares_by_chunk.
  at::Tensor of(int param) const;

 private:
  const Layout& layout_;
  int64_t shard_;
  std::vector<int64_t> first_chunks_; // by parameter, in its region
  std::vector<int64_t> num_chunks_; // by region
  std::vector<at::Tensor> squares_; // by region; memory comes with the first gradient
  std::vector<bool> is_known_; // by region
};

} // namespace zerocore
