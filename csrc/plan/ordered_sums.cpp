// Sums gradients in the order of ranks.
#include "plan/ordered_sums.h"

namespace zerocore {

bool OrderedSums::complete(bool adds, ScalePart rest, GradSteps& steps) const {
  GradStep last = make_step(GradStepKind::Sum, key_);
  last.to = facts_.offloads_grads() ? GradBuffer::Sums : GradBuffer::Kept;
  last.adds = adds && last.to == GradBuffer::Kept;
  last.scale = rest;
  bool gathers = false;
  if (mesh_.sums_across()) {
    GradStep first = make_step(GradStepKind::Sum, key_);
    first.to = GradBuffer::Sums;
    sum(GradBuffer::Scratch, mesh_.parts(), first, steps);
    exchange(steps);
    sum(GradBuffer::Across, mesh_.replicas.size, last, steps);
    if (!mesh_.shards_across) {
      gather(last.to, AxisName::Replicas, steps);
      gathers = true;
    }
  } else {
    sum(GradBuffer::Scratch, mesh_.parts(), last, steps);
  }
  if (!mesh_.shards_optimizer) {
    if (gathers) {
      steps.run(make_step(GradStepKind::WaitAcross, key_));
    }
    gather(last.to, AxisName::State, steps);
    gathers = true;
  }
  return gathers;
}

void OrderedSums::sum(GradBuffer from, int64_t parts, GradStep step, GradSteps& steps) const {
  step.from = from;
  step.parts = parts;
  steps.run(step);
}

// Each replica gets its part of the sums of all.
void OrderedSums::exchange(GradSteps& steps) const {
  GradStep step = make_step(GradStepKind::StartAcross, key_);
  step.op = TraceOp::ReduceScatter;
  step.from = GradBuffer::Sums;
  step.to = GradBuffer::Across;
  step.nbytes = nbytes_ / mesh_.state.size;
  steps.run(make_step(GradStepKind::Order, key_));
  steps.run(step);
  steps.run(make_step(GradStepKind::WaitAcross, key_));
}

void OrderedSums::gather(GradBuffer sums, AxisName axis, GradSteps& steps) const {
  GradStep step = make_step(GradStepKind::StartAcross, key_);
  step.op = TraceOp::GatherSums;
  step.axis = axis;
  step.from = step.to = sums;
  step.nbytes = nbytes_ / (axis == AxisName::State ? 1 : mesh_.state.size);
  steps.run(make_step(GradStepKind::Order, key_));
  steps.run(step);
}

} // namespace zerocore
