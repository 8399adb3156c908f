// Bytes of what a reduction holds and sends.
#include "plan/reduction_facts.h"

namespace zerocore {

int64_t ReductionFacts::nbytes_at(RegionKey key, GradBuffer place) const {
  const Region& region = region_of(key);
  const UnitMesh& mesh = mesh_of(key.first);
  switch (place) {
    case GradBuffer::Across:
      break;
    case GradBuffer::Kept:
      return region.grad.itemsize * (mesh.shards_gradients ? region.shard_numel : region.numel());
    case GradBuffer::Full:
      return region.grad.itemsize * region.numel();
    case GradBuffer::Wire:
      return region.reduce.itemsize * region.numel();
    case GradBuffer::Sums: // and what comes from the replicas
      return region.grad.itemsize * region.shard_numel * mesh.num_across() *
          (mesh.sums_across() ? 2 : 1);
    case GradBuffer::Scratch:
      if (mesh.sums_in_order) {
        return region.reduce.itemsize * region.numel();
      }
      return mesh.state.parts() * result_nbytes(key);
  }
  return 0;
}

} // namespace zerocore
