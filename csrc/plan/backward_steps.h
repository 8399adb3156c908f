// The calls of one forward pass, and the ordered steps of its backward that they turn into.
//
// The list is the same on every rank, whichever of the calls it made, and every collective of the
// backward is a position in it. A rank that finds a later step due first does all steps before it,
// so no rank waits for a collective that another one leaves out.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace zerocore {

enum class EventKind : uint8_t { Enter, Exit };

// A unit entered or left in a forward pass.
struct CallEvent {
  EventKind kind = EventKind::Enter;
  UnitId unit = -1;
  bool needs_backward = true; // of an Exit: its outputs require grad
  int32_t call = -1; // number of the call in its pass
  bool reads = true; // of an Exit: the call's backward reads the unit's parameters

  bool is_enter(UnitId of) const {
    return kind == EventKind::Enter && unit == of;
  }
};

enum class BackwardStepKind : uint8_t {
  Pre, // the backward of a call is about to run
  Gather, // the unit must be (on its way to be) unsharded
  Release, // the unit is not needed any more, and other calls of it follow or nothing is reduced
  Reduce, // the unit's gradients are complete: reduce them and release the unit
};

struct BackwardStep {
  BackwardStepKind kind = BackwardStepKind::Pre;
  UnitId unit = -1;
  int32_t call = -1; // whose backward begins or ends; not of a Gather
  bool reads = true; // of a Pre: the unit must be unsharded

  bool is_pre(int32_t of) const {
    return kind == BackwardStepKind::Pre && call == of;
  }
};

} // namespace zerocore
