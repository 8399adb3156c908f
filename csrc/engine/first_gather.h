// The first gather of a forward, begun when an optimizer has stepped: under logging and loading.
//
// Note [The gather at a step]
// Ranks issue it after the same step of an optimizer: the last one before the next pass, if there
// are as many as there were before the pass before. A step that was one too many, anything else
// that changes weights on all ranks, and whatever uses units outside of a pass drop it; then it is
// gathered again when it is needed.
//
// Note [Weights that change after a step]
// Another change of a weight after the step (`p.mul_()`, a NumPy view) may be one of this rank
// alone, and some changes show in no version counter. A rank that gathers again because of it would
// issue a collective that the others do not, and NCCL would pair it with their next one. So the
// gather sends a copy of the shard, which lies in this rank's part of the unit, and the forward
// compares it with the shard. A rank whose shard has changed raises when its forward ends; the
// others hear of that as of any forward that raises.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/units_in_use.h"

namespace zerocore {

class FirstGather {
 public:
  // Both outlive it.
  FirstGather(EngineParts& parts, UnitsInUse& in_use) : parts_(parts), in_use_(in_use) {}

  // Whether steps begin gathers at all.
  bool is_on() const {
    return parts_.context.policy.gathers_at_step(parts_.options.sharding) &&
        !parts_.schedule.order().empty();
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
  // What was gathered is not what is needed next; on all ranks.
  void drop();
  // A pass begins, which uses what was gathered.
  void begin_pass();
  // It ends: throws ValueError where it has computed with other weights than this rank's. On a
  // device the host waits for the comparison.
  void check();

 private:
  void give_back();
  void compare();

  EngineParts& parts_;
  UnitsInUse& in_use_;
  UnitId pending_ = -1; // gathered for the pass that comes next
  UnitId used_ = -1; // in the pass under way
  // By region, int64, on the host as of `compared_`: the first 8 bytes that differ, or -1.
  at::Tensor changed_;
  StreamEvent compared_;
  bool casts_ = false; // main weights were cast for it, by nobody else
  int num_steps_ = 0; // of optimizers since the last pass
  int expected_steps_ = 1;
};

} // namespace zerocore
