// Gradients that a device keeps in the host's memory: how what it has reduced gets there.
//
// Note [Gradients of a device on the host]
// A reduction leaves its result in a block of the pool. It is copied to the host beside the other
// streams, and the block is free when the copy is done. Where there is a gradient already, or where
// gradients travel in another type than they are kept in, it is copied to one of two buffers, from
// which the worker adds it; otherwise to its place. Readers of gradients wait for the worker.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "engine/offload/step_worker.h"
#include "engine/unit/unit.h"

namespace zerocore {

// `host` becomes what `from`, on the device, is on the compute stream now; the event is behind the
// copy. The unit is named in logs.
StreamEvent copy_to_host(const Unit& unit, const at::Tensor& host, const at::Tensor& from);

class HostGradients {
 public:
  // Both outlive it.
  HostGradients(const UnitContext& context, StepWorker& worker)
      : context_(context), worker_(worker) {}

  // `kept`, on the host, becomes what `from`, on the device, is on the compute stream now, or gets
  // it added. Both are 1-D. Blocks while both buffers are in use.
  StepWorker::Ticket offload_grad(
      const Unit& unit,
      const at::Tensor& from,
      const at::Tensor& kept,
      bool adds);

 private:
  at::Tensor take_buffer(const at::Tensor& like);

  const UnitContext& context_;
  StepWorker& worker_;
  std::array<StepWorker::Ticket, 2> used_until_ = {}; // by buffer
  size_t current_ = 0; // the buffer that was taken last
};

} // namespace zerocore
