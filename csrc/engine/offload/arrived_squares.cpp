// Sums of squares of a unit's gradients on the host.
#include "engine/offload/arrived_squares.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "kernels/ops.h"
#include "kernels/segments.h"

namespace zerocore {

ArrivedSquares::ArrivedSquares(const Layout& layout, int64_t shard)
    : layout_(layout),
      shard_(shard),
      first_chunks_(layout.places().size()),
      squares_(layout.regions().size()),
      is_known_(layout.regions().size()) {
  for (const Region& region : layout.regions()) {
    int64_t count = 0;
    for (const int param : region.params) {
      first_chunks_[param] = count;
      count += kernels::num_chunks_of(layout.owned(param, shard).size());
    }
    num_chunks_.push_back(count);
  }
}

std::function<void()> ArrivedSquares::take(int region, const at::Tensor& gradient) {
  at::Tensor& squares = squares_[region];
  if (!squares.defined()) {
    squares = at::empty({2 * num_chunks_[region]}, at::kDouble);
  }
  std::vector<at::Tensor> parts;
  for (const int param : layout_.regions()[region].params) {
    const int64_t numel = layout_.owned(param, shard_).size();
    parts.push_back(gradient.narrow(0, layout_.offset_in_shard(param, shard_), numel));
  }
  is_known_[region] = true;
  return [squares, parts = std::move(parts)] { kernels::squares_by_chunk(squares, parts); };
}

void ArrivedSquares::forget() {
  is_known_.assign(is_known_.size(), false);
}

at::Tensor ArrivedSquares::of(int param) const {
  const int64_t count = kernels::num_chunks_of(layout_.owned(param, shard_).size());
  return squares_[layout_.places()[param].region].narrow(0, 2 * first_chunks_[param], 2 * count);
}

} // namespace zerocore
