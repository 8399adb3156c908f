// All-to-alls of an optimizer of whole matrices, over the model's collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "engine/unit/unit_context.h"

namespace zerocore {

// Stands for a unit's name where no unit communicates.
inline const std::string kOptimizer = "optimizer";

// One under way. The context outlives it.
class Exchange {
 public:
  // Sends each rank of the group its part of `sent` (1-D, rank after rank). `sizes` are bytes.
  Exchange(
      const UnitContext& context,
      Collectives& group,
      const at::Tensor& sent,
      MessageSizes sizes);

  // The received tensor, for work of the compute stream from here on; blocks on the CPU.
  at::Tensor wait();

 private:
  const Streams& streams_;
  at::Tensor received_; // 1-D, of the dtype that was sent
  PendingCollective pending_;
};

} // namespace zerocore
