// Which units are unsharded, and the uses that keep them so; integers only.
//
// Which ones are resident follows from the order of calls alone. If a rank leaves a call later than
// the order has it, the unit counts as resharded and keeps its memory until then (`late`). So does
// a unit that a rank asks for in its backward, and what it then uses, until that ends.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "plan/unit_mesh.h"

namespace zerocore {

// Answers of a schedule to an event.
enum class ActionKind : uint8_t { Unshard, Reshard, Reduce };

struct Action {
  ActionKind kind = ActionKind::Unshard;
  UnitId unit = -1;
};

using Actions = std::vector<Action>;

// Where a unit stays unsharded although nothing uses it.
struct Staying {
  bool after_forward = false; // until its backward
  bool after_backward = false; // until its parameters change
};

class Residency {
 public:
  // A unit in use is not resharded.
  struct Uses {
    int active = 0; // calls entered and not left, by the order
    int entered = 0; // calls that this rank has entered and not left
    int holds = 0; // hold_unsharded() without its release_unsharded()
    bool in_backward = false; // by the order
    bool kept_for_backward = false; // by this rank, to the end of its backward
    bool stays = false; // as its Staying says, or because it was asked for ahead of its use
  };

  explicit Residency(const std::vector<UnitMesh>& meshes); // by unit

  // Whether any unit is gathered, and whether any is released.
  bool gathers() const {
    return gathers_;
  }
  bool releases() const {
    return releases_;
  }
  // Whether this one is, when nothing uses it.
  bool is_released(UnitId unit) const {
    return units_.at(unit).releases;
  }

  Uses& uses(UnitId unit) {
    return units_[unit].uses;
  }
  const Uses& uses(UnitId unit) const {
    return units_.at(unit).uses;
  }
  void set_staying(UnitId unit, Staying staying) {
    units_.at(unit).staying = staying;
  }
  // A forward or a backward of the unit has ended: whether it stays from here on.
  void leave_forward(UnitId unit) {
    units_[unit].uses.stays = units_[unit].staying.after_forward;
  }
  void end_backward(UnitId unit) {
    units_[unit].uses.stays = units_[unit].uses.stays && units_[unit].staying.after_backward;
  }
  // Unsharded, or on its way, by the order; and on this rank.
  bool is_resident(UnitId unit) const {
    return units_.at(unit).resident;
  }
  bool is_here(UnitId unit) const {
    return units_.at(unit).resident || units_.at(unit).late;
  }
  // Whether forwards neither gather nor release any unit.
  bool all_stay() const;

  void unshard(UnitId unit, Actions& out);
  // Where parameters are released, and nothing uses the unit.
  void release(UnitId unit, Actions& out);
  void release_all_but(const std::vector<UnitId>& keep, Actions& out);
  // This rank has left a call that kept the unit longer than the order does.
  void release_late(UnitId unit, Actions& out);
  // Unshards and releases a unit that other ranks need. One that this rank uses, because it asked
  // for it before, is gathered anew and kept.
  void serve(UnitId unit, Actions& out);
  // The backward is through with the unit.
  void leave_backward(UnitId unit, Actions& out);
  // The unit's parameters changed.
  void invalidate(UnitId unit, Actions& out);
  // A unit in use holds stale parameters: gathers it into the memory that it has.
  void regather(UnitId unit, Actions& out);
  // Everything but what is held unsharded comes to its end.
  void abort(Actions& out);

  void hold_unsharded(UnitId unit, Actions& out);
  void release_unsharded(UnitId unit, Actions& out);
  // Unshards a unit ahead of its use, and reshards one that stays; neither while it is in use.
  void unshard_ahead(UnitId unit, Actions& out);
  void end_stay(UnitId unit, Actions& out);

 private:
  struct UnitEntry {
    Uses uses;
    Staying staying;
    bool gathers = true; // full parameters have to be gathered at all
    bool releases = true; // they are given back after use (stage 3)
    bool resident = false;
    bool late = false; // not resident any more, but held, or used by this rank's backward
  };

  // `late`: this rank keeps its memory.
  void leave(UnitId unit, bool late, Actions& out);
  void end_late(UnitId unit, Actions& out);

  std::vector<UnitEntry> units_;
  bool gathers_ = false;
  bool releases_ = false;
};

} // namespace zerocore
