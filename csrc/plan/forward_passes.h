// The forward passes that a backward may still come for; integers only.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "plan/program.h"

namespace zerocore {

// One forward call of a unit, as the backward refers to it.
struct CallHandle {
  int64_t pass = -1;
  int32_t call = -1; // its number in the pass
  UnitId unit = -1;
};

struct ForwardPass {
  int64_t id = 0;
  bool grad = false;
  bool consumed = false; // a backward ran through it
  Instructions events;
  int32_t num_calls = 0; // of a pass that does not follow the order
  Program backward; // the one under way
};

class ForwardPasses {
 public:
  explicit ForwardPasses(int num_units) : units_(num_units) {}

  // A new pass; forgets those that no backward can come for any more.
  ForwardPass& open(bool grad);
  // Null if there is none.
  ForwardPass* find(int64_t id);
  const ForwardPass* find(int64_t id) const;
  void drop(int64_t id);
  void clear() {
    passes_.clear();
  }
  void forget_backwards();
  // Passes before this one are forgotten.
  int64_t oldest() const {
    return passes_.empty() ? next_ : passes_.front().id;
  }

  // Whether the unit has gradients to reduce at all.
  void set_reducible(UnitId unit, bool reducible) {
    units_.at(unit).reducible = reducible;
  }
  bool is_reducible(UnitId unit) const {
    return units_[unit].reducible;
  }
  // Whether the call's backward reads the unit's parameters; so does a call that is not known.
  bool reads(const CallHandle& call) const;
  // Whether the pass records a graph.
  bool records(int64_t id) const {
    const ForwardPass* pass = find(id);
    return pass != nullptr && pass->grad;
  }
  // The unit's parameters changed: no backward comes through it for a pass before.
  void note_change(UnitId unit);
  // For each unit whether a pass before this one is still to go backward through it. Reads that a
  // rank may do alone, for a log, are not waited for.
  std::vector<bool> awaited_before(int64_t id) const;

 private:
  struct TrainedUnit {
    bool reducible = true;
    int64_t changed_at = 0; // passes before this one have older parameters
  };

  bool is_outdated(const ForwardPass& pass) const;

  std::vector<TrainedUnit> units_;
  std::deque<ForwardPass> passes_; // also those that one came for: it may come once more
  int64_t next_ = 0;
  bool outdated_ = false; // parameters have changed since passes were last forgotten
};

} // namespace zerocore
