// Moments of AdamW where there is a place for them: in the host's mapping or in the file.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <vector>

#include "engine/unit/unit.h"

namespace zerocore {

class Moments {
 public:
  // The units outlive it, and their memory is there.
  Moments(const Units& units, const UnitContext& context);

  // Both of a trained parameter, 1-D, zeros; none of others, and none while an optimizer has them.
  std::vector<at::Tensor> make(UnitId unit, int param);
  // Whether make() has given them before: it writes to what may be in use.
  bool had(UnitId unit, int param) const {
    return units_.at(unit).given.at(param).has_value();
  }

 private:
  using Given = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct OfUnit {
    const Unit& unit;
    std::array<std::optional<Bucket>, 2> buckets; // exp_avg, exp_avg_sq
    std::vector<std::optional<Given>> given; // by parameter
  };

  std::vector<OfUnit> units_;
};

} // namespace zerocore
