// Calls of a c10d backend: gathers and reductions as plan/wire_methods says, and several in one
// launch.
//
// The backend is called directly, not through the dispatcher: 5 us less of host time a call.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <vector>

#include "plan/wire_methods.h"

namespace zerocore::wire {

// Null ones among them where the work is the current stream's.
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

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

// Collectives that are issued while it lives are one launch. It ends in any case: a backend would
// collect for ever.
class JointLaunch {
 public:
  // Throws what a backend does that cannot (Backend::supportsCoalescing).
  explicit JointLaunch(c10d::Backend& backend);
  JointLaunch(const JointLaunch&) = delete;
  JointLaunch& operator=(const JointLaunch&) = delete;
  ~JointLaunch();

  // Launches. May return null, as any call may.
  c10::intrusive_ptr<c10d::Work> end();

 private:
  c10d::Backend& backend_;
  bool open_ = true;
};

} // namespace zerocore::wire
