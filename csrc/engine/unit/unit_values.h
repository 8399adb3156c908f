// Temporary full parameters of a unit, in the dtype of its main weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/unit/unit.h"
#include "kernels/ops.h"

namespace zerocore {

// Full parameters in memory of their own. It comes from the device's allocator and not from the
// pool, whose arena stays reserved.
class FullValues {
 public:
  explicit FullValues(const Unit& unit); // must outlive the object

  // Copies the values in; a parameter whose value is undefined becomes zero.
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

// Returns this rank's part of a full region, 1-D, laid out as its shard is; a copy by rows.
at::Tensor staged_part(const Unit& unit, const Bucket& full, int region);
// The same for gathered parameters. A one-byte gather has rounded them; elements that still have
// the rounded value are returned with the exact value of the shard.
at::Tensor own_part(const Unit& unit, const Bucket& full, int region);

} // namespace zerocore
