// The instructions of a forward and of its backward, and how far this rank has run them.
//
// The program of a forward is the order of calls (plan/call_order.h). The program of a backward is
// compiled from the calls of its forward. Both are equal on all ranks, whichever calls a rank
// makes. A rank runs all instructions before the one that it needs, so no rank waits for a
// collective that another rank skips.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "common/types.h"

namespace zerocore {

enum class InstructionKind : uint8_t {
  Enter, // a call of the unit begins: unshard the unit and prefetch the next ones
  Exit, // the call ends
  Pre, // the backward of the call is about to run
  Gather, // start the unit's all-gather unless it is unsharded
  Release, // reshard the unit without a reduction: an earlier call reduces it, or none does
  Reduce, // the unit's gradients are complete: reshard the unit and reduce them
};

struct Instruction {
  InstructionKind kind = InstructionKind::Enter;
  UnitId unit = -1;
  bool needs_backward = true; // Exit: the call's outputs require grad
  int32_t call = -1; // number of the call in its pass; -1 for a Gather
  bool reads = true; // Exit, Pre: the call's backward reads the unit's parameters
  bool alone = false; // Exit: a read outside of calls, which one rank may do alone

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
  // Returns the next instruction; null at the end.
  const Instruction* next() const {
    return cursor_ < list_.size() ? &list_[cursor_] : nullptr;
  }
  // Returns the next instruction and moves past it.
  const Instruction& take() {
    return list_[cursor_++];
  }
  size_t cursor() const {
    return cursor_;
  }
  void restart() {
    cursor_ = 0;
  }
  // Returns the index of the first remaining instruction for which `is` holds.
  template <typename Is>
  std::optional<size_t> find(const Is& is) const {
    for (size_t i = cursor_; i < list_.size(); ++i) {
      if (is(list_[i])) {
        return i;
      }
    }
    return std::nullopt;
  }
  // Returns the first `count` different units that the remaining instructions enter.
  std::vector<UnitId> next_entered(int count) const;
  // Returns the units of the next `count` Pres that read parameters.
  std::vector<UnitId> next_read(int count) const;

 private:
  Instructions list_;
  size_t cursor_ = 0;
};

// Compiles the backward through the calls of a forward; it prefetches the next `prefetch` calls.
// `reduces(unit)` says whether the backward of the unit's first call reduces its gradients.
Program backward_program(
    const Instructions& forward,
    int prefetch,
    const std::function<bool(UnitId)>& reduces);

} // namespace zerocore
