// Which parameters of the units are trained: users set requires_grad on full parameters and on
// shards.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/unit/unit.h"
#include "plan/schedule.h"
#include "watch/alarm.h"

namespace zerocore {

class TrainableParams {
 public:
  // Is called when a parameter of a unit has got its gradient.
  using OnGradient = std::function<void(UnitId, int)>;

  // All outlive it.
  TrainableParams(const Units& units, Schedule& schedule, Alarm* alarm)
      : units_(units), schedule_(schedule), alarm_(alarm), trainable_(units.size()) {}

  void start(OnGradient on_gradient) {
    on_gradient_ = std::move(on_gradient);
  }
  // Notes which parameters of the unit require grad; ranks compare it.
  void note(UnitId unit);
  // Makes shards and full parameters agree on requires_grad: before a forward records, and before
  // a backward, which leaves frozen parameters alone.
  void sync(UnitId unit);
  // Shards are about to be shown: what programs have set on full parameters holds for them.
  void take_from_full(UnitId unit);
  // Parameters that were trained in the unit's last use, or in the backward under way.
  int count(UnitId unit) const {
    return trainable_[unit].count;
  }

 private:
  struct Trainable {
    int count = 0;
    uint64_t hash = 0; // of the flags of all parameters
  };

  const Units& units_;
  Schedule& schedule_;
  Alarm* alarm_; // null for none
  OnGradient on_gradient_;
  std::vector<Trainable> trainable_; // by unit
  uint64_t sum_ = 0; // of the units' hashes
};

} // namespace zerocore
