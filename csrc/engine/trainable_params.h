// Keeps requires_grad of full parameters and shards equal; the user may set either.
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
  // Called before autograd accumulates a gradient into a full parameter, and after it (`arrived`).
  using OnGradient = std::function<void(UnitId, int, bool arrived)>;

  // All arguments must outlive the object.
  TrainableParams(const Units& units, Schedule& schedule, Alarm* alarm)
      : units_(units), schedule_(schedule), alarm_(alarm), trainable_(units.size()) {}

  void start(OnGradient on_gradient);
  // Updates the hash of the unit's requires_grad flags, which ranks compare.
  void note(UnitId unit);
  // Makes shards and full parameters agree on requires_grad: before a forward records a graph, and
  // before a backward pass, which skips frozen parameters.
  void sync(UnitId unit);
  // Copies requires_grad from the full parameters to the shards, before modules show the shards.
  void take_from_full(UnitId unit);
  // Returns how many parameters of the unit required grad at the last sync().
  int count(UnitId unit) const {
    return trainable_[unit].count;
  }

 private:
  // Makes the parameter report its gradients; once per parameter.
  void watch(UnitId unit, size_t param);

  struct Trainable {
    int count = 0;
    uint64_t hash = 0; // of the flags of all parameters
  };

  const Units& units_;
  Schedule& schedule_;
  Alarm* alarm_; // null if the model has no alarm
  OnGradient on_gradient_;
  std::vector<Trainable> trainable_; // by unit
  uint64_t sum_ = 0; // sum of the units' hashes
};

} // namespace zerocore
