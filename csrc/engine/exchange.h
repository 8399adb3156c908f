// All-to-alls of an optimizer of whole matrices, over the model's collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "runtime/collectives.h"

namespace zerocore {

struct EngineParts;

// Stands for a unit's name where no unit communicates.
inline const std::string kOptimizer = "optimizer";

// One under way.
struct Exchange {
  at::Tensor received; // 1-D, of the dtype that was sent
  PendingCollective pending;
};

// Sends each rank its part of `sent` (1-D, rank after rank). `across`: over the ranks that hold the
// same shards, else over those that share them. `sizes` are bytes.
Exchange start_exchange(
    EngineParts& parts,
    bool across,
    const at::Tensor& sent,
    MessageSizes sizes);
// The received tensor, for work of the compute stream from here on; blocks on the CPU.
at::Tensor finish_exchange(EngineParts& parts, Exchange& exchange);

} // namespace zerocore
