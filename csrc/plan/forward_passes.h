// The forward passes that a backward may still go through; integers only.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "plan/program.h"

namespace zerocore {

// Identifies one forward call of a unit.
struct CallHandle {
  int64_t pass = -1;
  int32_t call = -1; // the call's number in the pass
  UnitId unit = -1;
};

struct ForwardPass {
  int64_t id = 0;
  bool grad = false;
  bool consumed = false; // a backward has started the program of this pass
  Instructions events;
  int32_t num_calls = 0; // counted only in a pass that does not follow the order
  Program backward; // the program of the running backward
};

class ForwardPasses {
 public:
  explicit ForwardPasses(int num_units) : units_(num_units) {}

  // Begins a new pass, and forgets passes that no backward can go through any more.
  ForwardPass& open(bool grad);
  // Returns null if there is no such pass.
  ForwardPass* find(int64_t id);
  const ForwardPass* find(int64_t id) const;
  void drop(int64_t id);
  void clear() {
    passes_.clear();
  }
  void forget_backwards();
  // Returns the id of the oldest pass that is still known.
  int64_t oldest() const {
    return passes_.empty() ? next_ : passes_.front().id;
  }

  // Sets whether the unit has trained parameters, whose gradients are reduced.
  void set_reducible(UnitId unit, bool reducible) {
    units_.at(unit).reducible = reducible;
  }
  bool is_reducible(UnitId unit) const {
    return units_[unit].reducible;
  }
  // Returns whether the call's backward reads the unit's parameters; true for an unknown call.
  bool reads(const CallHandle& call) const;
  // Returns whether the pass records a graph.
  bool records(int64_t id) const {
    const ForwardPass* pass = find(id);
    return pass != nullptr && pass->grad;
  }
  // Notes that the unit's parameters changed: no backward of an earlier pass goes through the unit.
  void note_change(UnitId unit);
  // Returns by unit whether a pass before `id` may still go backward through the unit. A read that
  // one rank may do alone, for a log, does not count.
  std::vector<bool> awaited_before(int64_t id) const;

 private:
  struct TrainedUnit {
    bool reducible = true;
    int64_t changed_at = 0; // passes with a smaller id used older parameters
  };

  bool is_outdated(const ForwardPass& pass) const;

  std::vector<TrainedUnit> units_;
  std::deque<ForwardPass> passes_; // with consumed ones: a retained graph may go backward again
  int64_t next_ = 0;
  bool outdated_ = false; // parameters have changed since open() last forgot passes
};

} // namespace zerocore
