// Saves in-place writes to unsharded parameters, and compares them between ranks. See Note [Writes
// in a forward] in engine/unit/unit.h.
//
// Note [Writes that differ]
// Each rank keeps only its own shard of a written parameter, so all ranks that share the unit must
// write the same values. At the end of a pass the ranks exchange a message anyway; it carries the
// checksums of all written parameters as one number. The next pass compares writes in a backward
// pass, writes in calls outside of passes, and writes to shards between steps. Each rank writes a
// different part of a shard's parameter, so this checksum covers the arguments of the write: a full
// tensor or a number. If the numbers differ, or after writes to a unit that only some ranks share,
// all ranks exchange their checksums parameter by parameter.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/gradients/grad_views.h"
#include "engine/unit/unit.h"
#include "plan/schedule.h"

namespace zerocore {

class InPlaceWrites {
 public:
  // All arguments must outlive the object.
  InPlaceWrites(const Units& units, const UnitContext& context, const Schedule& schedule);

  // Saves new writes to the unit's full parameters, when a call of the unit ends and before a
  // reshard.
  void save(UnitId unit);
  // When all ranks have left the pass: writes the saved values to the shards, or drops them.
  void finish();
  void drop();

  // -- checksums
  // Adds the checksums of the unit's written parameters; or of all units saved in the pass.
  void add(UnitId unit);
  void add_rest();
  // Adds a write to a shard; `number` is a checksum of its arguments. Ignores writes in an
  // optimizer's step, because ranks have the same gradients there.
  void note(UnitId unit, size_t param, int64_t number);
  bool takes_notes() const;
  // Adds the norms of whole parameters' gradients that a program has set, before a step uses them:
  // torch.autograd.grad, for example, does not average.
  void note_gradients(UnitId unit, const GradViews& views);
  void set_updating(bool updating) {
    updating_ = updating;
  }
  // Returns one number for all writes since the last forget(), 0 if there were none. After a write
  // to a unit of some ranks only, it differs on every rank: they then compare in detail.
  int64_t sum() const;
  // Returns whether full parameters were written since the last forget().
  bool is_urgent() const {
    return urgent_;
  }
  void forget();
  // Returns the first parameter with different written values on its ranks, or null. Collective
  // over all ranks.
  const std::string* find_differing() const;
  // Throws a c10::ValueError that names the parameter.
  [[noreturn]] static void fail(const std::string& fqn);

 private:
  bool is_shared(const Unit& unit) const;
  int64_t sharers_of(const Unit& unit) const;

  const Units& units_;
  const UnitContext& context_;
  const Schedule& schedule_;
  std::vector<size_t> first_; // by unit: index of its first parameter in sums_
  std::vector<int64_t> sums_; // checksum by parameter; 0: not written
  std::vector<UnitId> later_; // units written in the pass, whose checksums its end adds
  bool urgent_ = false, updating_ = false;
};

} // namespace zerocore
