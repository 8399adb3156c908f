// The reports that ranks write for each other after an alarm, and the sentence that follows from
// all.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "watch/ledger.h"

namespace zerocore {

struct RankReport {
  LedgerState ledger;
  std::string elsewhere; // what the process waits in apart from the ledger; empty if it does not
  bool answered = false; // else nothing is known but `ended`
  std::optional<std::string> ended; // how the program ended

  std::string encode() const;
  static RankReport decode(const std::string& text);
};

// Names collective, units and ranks, in sentences. `reports` are by rank, `params` the names behind
// LedgerState::trainable, `advice` what to do about a rank that is only slow. `unreachable`: what
// the others could not be asked without; empty if they were.
std::string describe(
    const std::vector<RankReport>& reports,
    const std::vector<std::string>& params,
    const std::string& advice,
    const std::string& unreachable = "");

} // namespace zerocore
