// Simulates a step on integers. It drives a schedule as the engine does, and carries out the
// actions, all-gathers and reductions with sizes instead of memory.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/layout.h"
#include "plan/memory_plan.h"
#include "plan/pool_map.h"
#include "plan/reduction.h"
#include "plan/schedule.h"
#include "plan/unit_mesh.h"
#include "plan/unsharding.h"

namespace zerocore {

// An event that the engine reports to its schedule.
struct ScheduleEvent {
  enum Kind : uint8_t { BeginPass, Enter, Exit, EndPass, BeginBackward, Pre, Ready, EndBackward };
  Kind kind = BeginPass;
  int32_t index = -1; // index in the order; for a Ready the unit
  int32_t moment = 0; // see PlannedEvent
};

class StepSimulation final : private Steps {
 public:
  StepSimulation(
      const std::vector<UnitPlan>& units,
      const Instructions& order,
      const PlanOptions& options,
      PoolMap pool);
  StepSimulation(const StepSimulation&) = delete; // reduction_ points to layouts_
  StepSimulation& operator=(const StepSimulation&) = delete;

  // Simulates the first step and a steady one; events() has the steady one.
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
  const UnitMesh& mesh(size_t unit) const {
    return meshes_[unit];
  }
  // Returns the bytes of gradients that persist between steps.
  int64_t kept_gradients(size_t unit) const {
    return reduction_.kept_nbytes(static_cast<UnitId>(unit));
  }

 private:
  void step();
  void optimizer_step();
  bool gathers_behind_step(UnitId unit) const;
  void tell(const ScheduleEvent& event);
  void tell_schedule(const ScheduleEvent& event, Actions& actions);
  void run(Actions& actions);
  void unshard(UnitId unit);
  void run(const Step& step) override;

  PlanOptions options_;
  Instructions order_;
  std::vector<ScheduleEvent> micro_batch_; // a forward and its backward
  std::vector<UnitMesh> meshes_; // by unit
  Schedule schedule_;
  std::vector<Layout> layouts_;
  Reduction reduction_;
  std::vector<CallHandle> calls_; // by instruction of the order; only Exits have one
  std::vector<PlannedEvent> events_;
  PoolMap pool_;
  std::vector<Unsharding> unsharding_; // by unit
  std::vector<bool> gathered_; // by unit: no parameter has changed since its last all-gather
  bool sync_ = true; // this is the last micro-batch of the step
  int32_t moment_ = 0;
};

} // namespace zerocore
