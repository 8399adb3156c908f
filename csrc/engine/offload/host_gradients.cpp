// Gradients that a device keeps in the host's memory.
#include "engine/offload/host_gradients.h"

#include <ATen/ops/empty.h>

#include "engine/unit/host_states.h"
#include "kernels/ops.h"

namespace zerocore {

StreamEvent copy_to_host(const Unit& unit, const at::Tensor& host, const at::Tensor& from) {
  const Streams& streams = *unit.context().streams;
  streams.order(StreamRole::DeviceToHost, StreamRole::Compute);
  streams.note_read(StreamRole::DeviceToHost, from, "leaves", unit.name());
  {
    const auto guard = streams.use(StreamRole::DeviceToHost);
    host.copy_(from, /*non_blocking=*/true);
  }
  return streams.record(StreamRole::DeviceToHost);
}

StepWorker::Ticket HostGradients::offload_grad(
    const Unit& unit,
    const at::Tensor& from,
    const at::Tensor& kept,
    bool adds) {
  const bool in_place = !adds && from.scalar_type() == kept.scalar_type();
  const at::Tensor to = in_place ? kept : take_buffer(from);
  const StreamEvent copied = copy_to_host(unit, to, from);
  const auto record =
      context_.note(TraceOp::ToHost, unit.id(), static_cast<int64_t>(from.nbytes()));
  const auto ticket = worker_.submit(record, [copied, to, kept, adds, in_place] {
    Streams::synchronize(copied);
    if (!in_place) {
      kernels::accumulate(kept, to, /*num_parts=*/1, adds);
    }
  });
  if (!in_place) {
    used_until_[current_] = ticket;
  }
  return ticket;
}

// The other buffer, once nobody uses it; memory apart for a region that was frozen when the model
// was sharded and does not fit.
at::Tensor HostGradients::take_buffer(const at::Tensor& like) {
  const HostLayout& layout = context_.host->layout();
  current_ = 1 - current_;
  worker_.wait(used_until_[current_]);
  const Range buffer = layout.landing_buffer(static_cast<int>(current_));
  if (static_cast<int64_t>(like.nbytes()) > buffer.size()) {
    return at::empty({like.numel()}, like.options().device(at::kCPU));
  }
  return context_.host->mapped()->view(buffer.begin, like.numel(), like.scalar_type());
}

} // namespace zerocore
