// Sums gradients in the order of ranks, see Note [Sums in order].
#pragma once

#include "plan/grad_steps.h"
#include "plan/reduction_facts.h"

namespace zerocore {

class OrderedSums {
 public:
  // Of one region. The facts outlive it.
  OrderedSums(const ReductionFacts& facts, RegionKey key)
      : facts_(facts),
        key_(key),
        mesh_(facts.mesh_of(key.first)),
        nbytes_(facts.region_of(key).grad.itemsize * facts.region_of(key).numel()) {}

  // Whether it needs GradBuffer::Sums.
  bool takes_block() const {
    return facts_.offloads_grads() || mesh_.sums_across();
  }
  // Sums the parts that have come, scaled by `rest`. `adds`: to the kept gradient, unless the host
  // keeps that. Returns whether a last gather has to be waited for.
  bool complete(bool adds, ScalePart rest, GradSteps& steps) const;

 private:
  void sum(GradBuffer from, int64_t parts, GradStep step, GradSteps& steps) const;
  void exchange(GradSteps& steps) const;
  void gather(GradBuffer sums, AxisName axis, GradSteps& steps) const;

  const ReductionFacts& facts_;
  RegionKey key_;
  const UnitMesh& mesh_;
  int64_t nbytes_; // of all gradients, in the type that they are kept in
};

} // namespace zerocore
