// Which units are unsharded, and which uses keep them unsharded; integers only.
//
// The order of calls alone decides which units are resident, so all ranks agree on them. If a rank
// is still in a call that the order has ended, the unit counts as resharded, but this rank keeps
// its memory until the call ends (`late`). The same holds for a unit that a rank asks for in its
// backward, and for units that this backward uses, until the backward ends.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "plan/unit_mesh.h"

namespace zerocore {

// The actions on a unit that the engine must carry out after an event.
enum class ActionKind : uint8_t { Unshard, Reshard, Reduce };

struct Action {
  ActionKind kind = ActionKind::Unshard;
  UnitId unit = -1;
};

using Actions = std::vector<Action>;

// When an unused unit stays unsharded.
struct Staying {
  bool after_forward = false; // from its forward to its backward
  bool after_backward = false; // from its backward until its parameters change
};

class Residency {
 public:
  // The uses that keep a unit unsharded.
  struct Uses {
    int active = 0; // open calls, by the order
    int entered = 0; // open calls of this rank
    int holds = 0; // calls of hold_unsharded() without their release_unsharded()
    bool in_backward = false; // its backward runs, by the order
    bool kept_for_backward = false; // this rank keeps it until its backward ends
    bool stays = false; // by its Staying, or after unshard_ahead()
  };

  explicit Residency(const std::vector<UnitMesh>& meshes); // by unit

  // Return whether any unit is gathered, and whether any is resharded after use.
  bool gathers() const {
    return gathers_;
  }
  bool releases() const {
    return releases_;
  }
  // Returns whether the unit is resharded after use.
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
  // End a forward or a backward of the unit; its Staying decides whether it stays unsharded.
  void leave_forward(UnitId unit) {
    units_[unit].uses.stays = units_[unit].staying.after_forward;
  }
  void end_backward(UnitId unit) {
    units_[unit].uses.stays = units_[unit].uses.stays && units_[unit].staying.after_backward;
  }
  // Return whether the unit is unsharded or its all-gather was issued: by the order, and on this
  // rank.
  bool is_resident(UnitId unit) const {
    return units_.at(unit).resident;
  }
  bool is_here(UnitId unit) const {
    return units_.at(unit).resident || units_.at(unit).late;
  }
  // Returns whether forwards neither gather nor reshard any unit.
  bool all_stay() const;

  void unshard(UnitId unit, Actions& out);
  // Reshards the unit if nothing uses it, unless full parameters always stay.
  void release(UnitId unit, Actions& out);
  void release_all_but(const std::vector<UnitId>& keep, Actions& out);
  // Reshards a late unit when the last call of this rank has ended.
  void release_late(UnitId unit, Actions& out);
  // Unshards and reshards a unit that other ranks need. If this rank uses the unit, it gathers the
  // unit again and keeps the memory.
  void serve(UnitId unit, Actions& out);
  // Ends the backward's use of the unit.
  void leave_backward(UnitId unit, Actions& out);
  // Marks gathered parameters as stale.
  void invalidate(UnitId unit, Actions& out);
  // Gathers a stale unit in use again, into its present memory.
  void regather(UnitId unit, Actions& out);
  // Ends all uses except holds, and reshards the units.
  void abort(Actions& out);

  void hold_unsharded(UnitId unit, Actions& out);
  void release_unsharded(UnitId unit, Actions& out);
  // Unshards a unit before its use; end_stay() reshards it unless it is in use.
  void unshard_ahead(UnitId unit, Actions& out);
  void end_stay(UnitId unit, Actions& out);

 private:
  struct UnitEntry {
    Uses uses;
    Staying staying;
    bool gathers = true; // its full parameters are gathered (stages 1 to 3)
    bool releases = true; // it is resharded after use (stage 3)
    bool resident = false; // unsharded by the order
    bool late = false; // resharded by the order, but this rank keeps its memory
  };

  // Reshards the unit by the order; with `late` this rank keeps the memory.
  void end_residency(UnitId unit, bool late, Actions& out);
  void end_late(UnitId unit, Actions& out);

  std::vector<UnitEntry> units_;
  bool gathers_ = false;
  bool releases_ = false;
};

} // namespace zerocore
