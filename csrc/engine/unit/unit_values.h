// Full parameters of a unit for a while, before anything is rounded.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/unit/unit.h"
#include "kernels/ops.h"

namespace zerocore {

// In memory from the allocator, not the pool: what is only needed once must not stay reserved.
class FullValues {
 public:
  explicit FullValues(const Unit& unit); // which outlives it

  // Copies the values in; zero where they are undefined.
  void fill(const std::vector<at::Tensor>& values) const;
  // Rank 0's values to all.
  void broadcast(Collectives& collectives) const;
  // This rank's part from each rank.
  void gather() const;
  // Views of the values, by parameter.
  std::vector<at::Tensor> by_param() const;
  const Bucket& bucket() const {
    return bucket_;
  }

 private:
  const Unit& unit_;
  const Streams& streams_;
  Bucket bucket_;
};

// Where the rows of all ranks on the wire belong in a region of unsharded parameters.
std::vector<kernels::Piece> row_pieces(const Layout& layout, int region);

// This rank's part of a region of unsharded parameters as it lies in its shard, 1-D. A copy where
// shards are rows.
at::Tensor staged_part(const Unit& unit, const Bucket& full, int region);
// The same of gathered parameters: of an encoded region with the values of the unit's shards where
// it has what these became on their way.
at::Tensor own_part(const Unit& unit, const Bucket& full, int region);

} // namespace zerocore
