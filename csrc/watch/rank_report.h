// What ranks write for each other when some wait for too long, and what follows from all of it.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <map>
#include <string>
#include <vector>

#include "watch/ledger.h"

namespace zerocore {

// A collective without a number that a thread waits in, the `count`-th of that name.
struct NamedWait {
  std::string what;
  int64_t count = 0;
  bool decides = false; // the program goes on behind it, and all ranks call it alike
};

enum class RankState : int64_t { Silent, Lives, Overdue, Ended };

struct RankReport {
  // Overdue: a collective has failed here or exceeded the limit. Of a silent rank nothing is known.
  RankState state = RankState::Silent;
  std::string error; // that ended the program; empty for none
  std::string operation; // such as "full_state_dict"; empty outside of one
  std::vector<LedgerState> models; // that this rank has not freed
  std::vector<NamedWait> waits;
  std::vector<NamedWait> begun; // the last one of each name, also those that have ended

  bool answered() const {
    return state == RankState::Lives || state == RankState::Overdue;
  }
  // Lines, which may be followed by others.
  std::string encode() const;
  static RankReport decode(std::istream& in);
};

using ParamNames = std::map<int64_t, std::vector<std::string>>; // by id of the model

// Whether some rank waits for ever: in a collective that another rank has not begun, while that one
// waits for ever or has ended. All reports are right at one moment: a rank that waits for ever does
// so from its report on. `reports` are by rank.
bool is_deadlock(const std::vector<RankReport>& reports);

// Names collective, model, units and ranks, in sentences. `advice`: about a rank that is only slow.
// `unreachable`: what the others could not be asked without; empty if they were.
std::string describe(
    const std::vector<RankReport>& reports,
    const ParamNames& params,
    const std::string& advice,
    const std::string& unreachable = "");

} // namespace zerocore
