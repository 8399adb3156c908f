// Launches the collectives of reductions.
#include "engine/gradients/reduction_launches.h"

#include <utility>

namespace zerocore {

void ReductionLaunches::start(
    const Unit& unit,
    const GradStep& step,
    Collectives& collectives,
    const at::Tensor& to,
    const at::Tensor& from,
    PendingCollective& pending) {
  if (collectives_ != &collectives) {
    start_joint();
  }
  unit.context().streams->order(collectives.reducing(), StreamRole::ReduceScatter);
  CollectiveTag tag = unit.tag(step.op, step.nbytes);
  if (unit.settings().reduce && step.kind == GradStepKind::Start) {
    tag.own = &unit.settings().reduce;
  }
  const bool is_waited_for = unit.context().mesh.sums_in_order && step.kind != GradStepKind::Start;
  if (unit.layout().regions().size() > 1 && collectives.launches_together() && tag.own == nullptr &&
      !is_waited_for) {
    collectives_ = &collectives;
    op_ = step.op;
    calls_.push_back({to, from, std::move(tag)});
    pending_.push_back(&pending);
  } else if (step.op == TraceOp::AllReduce) {
    pending = collectives.all_reduce(to, std::move(tag));
  } else {
    pending = collectives.reduce_scatter(to, from, std::move(tag));
  }
}

void ReductionLaunches::start_joint() {
  if (calls_.empty()) {
    return;
  }
  ReductionLaunches joint = std::exchange(*this, {});
  auto started = joint.collectives_->start_together(joint.op_, std::move(joint.calls_));
  for (size_t i = 0; i < started.size(); ++i) {
    *joint.pending_[i] = std::move(started[i]);
  }
}

} // namespace zerocore
