// Splits the scale of gradients.
#include "engine/gradients/gradient_scale.h"

namespace zerocore {

namespace {

// A power of two near the square root of a number of ranks, as FSDP2 divides float16 gradients
// before they are summed: neither small ones nor sums leave its range.
int64_t near_square_root(int64_t num_ranks) {
  int64_t factor = 1;
  while (num_ranks % factor == 0 && num_ranks / factor > factor) {
    factor *= 2;
  }
  return factor;
}

// The part that gradients get when they are packed.
double packed_scale(const Region& region, const UnitMesh& mesh, double all) {
  if (static_cast<at::ScalarType>(region.reduce.dtype) == at::kHalf) {
    return 1.0 / static_cast<double>(near_square_root(mesh.world_size()));
  }
  return mesh.sums_in_order ? 1.0 : all;
}

} // namespace

double scale_of(const GradStep& step, const Unit& unit) {
  const double all = unit.settings().gradient_scale;
  const double packed =
      packed_scale(unit.layout().regions()[step.region], unit.context().mesh, all);
  switch (step.scale) {
    case ScalePart::None:
      return 1.0;
    case ScalePart::All:
      return all;
    case ScalePart::Packed:
      return packed;
    case ScalePart::Rest:
      return all / packed;
    case ScalePart::RestUndone:
      return packed / all;
  }
  TORCH_INTERNAL_ASSERT(false);
}

} // namespace zerocore
