// Compares what the ranks have written to unsharded parameters in place.
//
// Note [Writes that differ]
// Each rank keeps its own part of what it has written, so a write must be the same on all ranks.
// Checksums of written parameters travel as one number in the message at the end of a pass, which
// is sent anyway. Writes of a backward, and of calls outside of passes, are compared at the end of
// the next pass.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/unit/unit.h"

namespace zerocore {

class WriteCheck {
 public:
  // Both outlive it.
  WriteCheck(const Units& units, const UnitContext& context);

  // The unit holds a write, which is summed now, or with the others of the pass.
  void add(UnitId unit);
  void add_later(UnitId unit);
  void add_rest();
  // A number of all that was written since the last forget(), 0 for nothing.
  int64_t sum() const;
  void forget();
  // On all ranks, whose sums differ. Throws c10::ValueError that names the parameter.
  [[noreturn]] void fail() const;

 private:
  bool is_shared(const Unit& unit) const;

  const Units& units_;
  const UnitContext& context_;
  std::vector<size_t> first_; // by unit: number of its first parameter
  std::vector<int64_t> sums_; // by parameter; 0 of one that was not written to
  std::vector<UnitId> later_;
};

} // namespace zerocore
