// Temporary full parameters of a unit, in the dtype of its main weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/unit/unit.h"
#include "kernels/ops.h"

namespace zerocore {

// Full parameters in memory of their own. It comes from the device's allocator, not from the pool,
// which would reserve it for ever.
class FullValues {
 public:
  explicit FullValues(const Unit& unit); // must outlive the object

  // Copies the values; a parameter with an undefined value becomes zero.
  void fill(const std::vector<at::Tensor>& values) const;
  // Broadcasts rank 0's values.
  void broadcast(Collectives& collectives) const;
  // All-gathers the ranks' own parts.
  void gather() const;
  // Returns views of the values, by parameter.
  std::vector<at::Tensor> by_param() const;
  const Bucket& bucket() const {
    return bucket_;
  }

 private:
  const Unit& unit_;
  const Streams& streams_;
  Bucket bucket_;
};

// Returns the copies that move gathered rows from rank order to their place in the full region. See
// Note [Shards of rows].
std::vector<kernels::Piece> row_pieces(const Layout& layout, int region);

// Returns this rank's part of a full region, 1-D, in the layout of its shard; by rows, a copy.
at::Tensor staged_part(const Unit& unit, const Bucket& full, int region);
// staged_part() of gathered parameters, which a one-byte gather has rounded. Elements that still
// have the rounded value become the exact value of the shard.
at::Tensor own_part(const Unit& unit, const Bucket& full, int region);

} // namespace zerocore
