// The first gather of a forward, begun when an optimizer has stepped: under logging and loading.
//
// Note [The gather at a step]
// Ranks issue it after the same step of an optimizer: the last one before the next pass, if there
// are as many as there were before the pass before. A step that was one too many, anything else
// that changes weights, and whatever uses units outside of a pass drop it; then it is gathered
// again when it is needed. As at stages 1 and 2 a change counts where a version counter shows it,
// and is to be made on all ranks.
#pragma once

#include <vector>

#include "engine/unit_lifecycle.h"

namespace zerocore {

class FirstGather {
 public:
  // `at_step`: see UnitMesh::gathers_at_step. The others outlive it.
  FirstGather(bool at_step, Schedule& schedule, UnitLifecycle& lifecycle)
      : at_step_(at_step), schedule_(schedule), lifecycle_(lifecycle) {}

  // Whether steps begin gathers at all.
  bool is_on() const {
    return at_step_ && !schedule_.order().events().empty();
  }
  // An optimizer is going to update units, outside of calls.
  void begin_update(const std::vector<UnitId>& units);
  // It has. Whether the gather is to begin now.
  bool is_due() const {
    return is_on() && pending_ < 0 && num_steps_ == expected_steps_;
  }
  void begin();
  bool is_pending() const {
    return pending_ >= 0;
  }
  // The gathered unit is not needed next; on all ranks.
  void drop();
  // A pass begins, which uses what was gathered, unless that has changed since.
  void begin_pass();

 private:
  bool at_step_;
  Schedule& schedule_;
  UnitLifecycle& lifecycle_;
  UnitId pending_ = -1; // gathered for the pass that comes next
  int num_steps_ = 0; // of optimizers since the last pass
  int expected_steps_ = 1;
};

} // namespace zerocore
