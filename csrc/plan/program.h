// The instructions of a forward and of its backward, and how far this rank has come in them.
//
// The program of a forward is the order of calls (plan/call_order.h); that of a backward is
// compiled from the calls of its forward. Either is the same on every rank, whichever of the calls
// the rank makes, and each collective is a position in it. A rank that finds a later instruction
// due first carries out all before it, so no rank waits for a collective that another one leaves
// out.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "common/types.h"

namespace zerocore {

enum class InstructionKind : uint8_t {
  Enter, // a call of the unit begins: the unit must be unsharded, and the next ones on their way
  Exit, // the call ends
  Pre, // the backward of the call is about to run
  Gather, // the unit must be (on its way to be) unsharded
  Release, // the unit is not needed any more, and other calls of it follow or nothing is reduced
  Reduce, // the unit's gradients are complete: reduce them and release the unit
};

struct Instruction {
  InstructionKind kind = InstructionKind::Enter;
  UnitId unit = -1;
  bool needs_backward = true; // of an Exit: its outputs require grad
  int32_t call = -1; // number of the call in its pass; not of a Gather
  bool reads = true; // of an Exit or a Pre: the call's backward reads the unit's parameters
  bool alone = false; // of an Exit: a read outside of calls, which a rank may do alone

  bool is_enter(UnitId of) const {
    return kind == InstructionKind::Enter && unit == of;
  }
  bool is_pre(int32_t of) const {
    return kind == InstructionKind::Pre && call == of;
  }
};

using Instructions = std::vector<Instruction>;

class Program {
 public:
  Program() = default;
  explicit Program(Instructions list) : list_(std::move(list)) {}

  const Instructions& list() const {
    return list_;
  }
  // The instruction that is due; null at the end.
  const Instruction* next() const {
    return cursor_ < list_.size() ? &list_[cursor_] : nullptr;
  }
  // Returns the instruction that is due, and makes the one behind it due.
  const Instruction& take() {
    return list_[cursor_++];
  }
  size_t cursor() const {
    return cursor_;
  }
  void restart() {
    cursor_ = 0;
  }
  // Index of the first instruction for which `is` holds, of those that are left; none if it holds
  // for none.
  template <typename Is>
  std::optional<size_t> find(const Is& is) const {
    for (size_t i = cursor_; i < list_.size(); ++i) {
      if (is(list_[i])) {
        return i;
      }
    }
    return std::nullopt;
  }
  // The first `count` units that the rest enters, each of them once; and the units of the next
  // `count` Pres that read parameters.
  std::vector<UnitId> next_entered(int count) const;
  std::vector<UnitId> next_read(int count) const;

 private:
  Instructions list_;
  size_t cursor_ = 0;
};

// The backward through the calls of a forward. `prefetch`: calls for which gathers run ahead.
// `reduces(unit)`: whether the unit's gradients are reduced when its first call is left.
Program backward_program(
    const Instructions& forward,
    int prefetch,
    const std::function<bool(UnitId)>& reduces);

} // namespace zerocore
