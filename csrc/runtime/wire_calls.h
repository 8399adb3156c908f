// Calls of a c10d backend: gathers and reductions as plan/wire_methods says, and several in one
// launch.
//
// The backend is called directly, not through the dispatcher: 5 us less of host time a call.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <exception>
#include <vector>

#include "plan/wire_methods.h"

namespace zerocore::wire {

// Null ones among them where the work is the current stream's.
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// Whether the ranks reach each other without a network; over gloo, collective.
bool share_loopback(c10d::Backend& backend);

// `async`: of c10d; without, what a device does is the work of the current stream.
Works gather(
    c10d::Backend& backend,
    const GatherMethod& method,
    const at::Tensor& full,
    const at::Tensor& own,
    bool async);
Works reduce(
    c10d::Backend& backend,
    const ReduceMethod& method,
    at::Tensor received,
    at::Tensor full,
    bool async);
// Sums in place.
Works all_reduce(c10d::Backend& backend, const at::Tensor& tensor, bool async);

// The collectives that `issue` begins are one launch, which ends in any case: a backend would
// collect for ever. Throws what a backend does that cannot (Backend::supportsCoalescing).
template <typename Issue>
Works launch_together(c10d::Backend& backend, const Issue& issue) {
  backend.startCoalescing();
  try {
    issue();
  } catch (...) {
    try {
      backend.endCoalescing();
    } catch (const std::exception&) { // what was thrown first tells more
    }
    throw;
  }
  return {backend.endCoalescing()};
}

} // namespace zerocore::wire
