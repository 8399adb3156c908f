// Plays one step on integers: the schedule's actions as the engine carries them out, with sizes in
// place of memory.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "plan/layout.h"
#include "plan/memory_plan.h"
#include "plan/pool_map.h"
#include "plan/schedule.h"
#include "plan/stage_policy.h"

namespace zerocore {

class StepSimulation {
 public:
  StepSimulation(
      const std::vector<UnitPlan>& units,
      const std::vector<CallEvent>& order,
      const PlanOptions& options,
      PoolMap pool);

  // The first step and a steady one; events() are those of the second.
  void run_steps();

  const std::vector<PlannedEvent>& events() const {
    return events_;
  }
  const PoolMap& pool() const {
    return pool_;
  }
  const Layout& layout(size_t unit) const {
    return layouts_[unit];
  }
  // Whether the unit's gradients were ever reduced.
  bool reduced(size_t unit) const {
    return reduced_[unit];
  }

 private:
  // As the reducer's RegionGrads.
  struct RegionGrads {
    int64_t full_slot = 0; // bytes; 0 for none
    int64_t wire_slot = 0;
    bool valid = false; // a reduced value is there
    bool local = false; // local sums are
    bool adds = false;
  };
  struct Reduction {
    UnitId unit = -1;
    int region = 0;
    int64_t scratch_slot = 0;
    int64_t across_nbytes = 0; // of the sum over the replicas that is still to come
  };

  void step();
  void micro_batch();
  void forward(Actions& actions);
  void backward(Actions& actions);
  int32_t first_enter(UnitId unit) const;
  void run(Actions& actions);
  void unshard(UnitId unit, const Layout& layout);
  void reduce(UnitId unit, const Layout& layout);
  void attach(UnitId unit, const Layout& layout, int region, bool held);
  void issue(UnitId unit, const Layout& layout, int region);
  void complete();
  bool uses_slots(const Layout& layout) const;
  int64_t take(const BlockKey& key, int64_t nbytes);
  void give_back(const BlockKey& key, int64_t& slot);
  void add(TraceOp op, UnitId unit, int64_t nbytes, bool across = false);

  PlanOptions options_;
  std::vector<CallEvent> order_;
  std::vector<BackwardEvent> backward_;
  StagePolicy policy_;
  Schedule schedule_;
  std::vector<Layout> layouts_;
  std::vector<std::vector<RegionGrads>> grads_; // by unit and region
  std::vector<std::pair<CallEvent, CallHandle>> calls_;
  std::vector<PlannedEvent> events_;
  std::vector<bool> reduced_;
  PoolMap pool_;
  std::vector<Reduction> in_flight_;
  bool sync_ = true; // the last micro-batch of the step
  int32_t moment_ = 0;
};

} // namespace zerocore
