// Keeps and compares what programs write to unsharded parameters in place. See Note [Writes in a
// forward] in engine/unit/unit.h.
//
// Note [Writes that differ]
// Each rank keeps its own part of what it has written, so a write must be the same on all ranks
// that share the unit. Checksums of written parameters travel as one number in the message at the
// end of a pass, which is sent anyway. Writes of a backward, and of calls outside of passes, are
// compared at the end of the next pass. So are writes to shards between steps, of which each rank
// makes another part: there the checksum is that of the arguments, a full tensor or a number. If
// the numbers differ, all ranks exchange their checksums parameter by parameter; and also if the
// ranks wrote to a unit that only some of them share, because one number cannot compare those.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/unit/unit.h"
#include "plan/schedule.h"

namespace zerocore {

class InPlaceWrites {
 public:
  // All outlive it.
  InPlaceWrites(const Units& units, const UnitContext& context, const Schedule& schedule);

  // The unit's parameters may have been changed in place: a call of it ends, or it is given back.
  void keep(UnitId unit);
  // All ranks have left the pass: the shards take the writes; or its writes are dropped.
  void finish();
  void drop();

  // -- what ranks compare
  // The unit holds a write, which is summed now; and those that were kept in the pass.
  void add(UnitId unit);
  void add_rest();
  // A function has written to a shard; `number` is a checksum of its arguments. Ignored in an
  // optimizer's step, whose gradients are the same on all ranks.
  void note(UnitId unit, size_t param, int64_t number);
  bool takes_notes() const;
  void set_updating(bool updating) {
    updating_ = updating;
  }
  // A number of all that was written since the last forget(), 0 for nothing. It is not the same on
  // all ranks if they have to compare.
  int64_t sum() const;
  // Whether unsharded parameters were written to since the last forget().
  bool is_urgent() const {
    return urgent_;
  }
  void forget();
  // The first parameter to which ranks that share it have written other values; null for none.
  // Collective of all ranks.
  const std::string* find_differing() const;
  // Throws c10::ValueError that names the parameter.
  [[noreturn]] static void fail(const std::string& fqn);

 private:
  bool is_shared(const Unit& unit) const;
  int64_t sharers_of(const Unit& unit) const;

  const Units& units_;
  const UnitContext& context_;
  const Schedule& schedule_;
  std::vector<size_t> first_; // by unit: number of its first parameter
  std::vector<int64_t> sums_; // by parameter; 0 of one that was not written to
  std::vector<UnitId> later_; // of the pass, to be summed at its end
  bool urgent_ = false, updating_ = false;
};

} // namespace zerocore
