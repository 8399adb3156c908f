// Small messages between the ranks of a model about the calls of a pass, on the CPU only.
//
// See Note [One order on every rank] in plan/schedule.h. Ranks answer in rounds: each says which
// unit it needs or that it has left the pass, and all hear which unit is served next.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plan/pass_calls.h"
#include "runtime/collectives.h"

namespace zerocore {

class ControlChannel {
 public:
  struct Answer {
    std::optional<UnitId> wanted; // the first unit in registration that any rank needs
    int num_writes = 0; // the fewest by a rank that needs it, see Note [Writes in a forward]
    bool changed = false; // on any rank
    bool skipped = false; // any rank left out calls that others may have made
    std::optional<int> failed; // the last rank whose forward raised
    int64_t gathered = 0; // of `own`: a number for what this rank has gathered again
    bool gathers_differ = false;
  };

  // `control`: a gloo group of all ranks of the model.
  ControlChannel(c10::intrusive_ptr<c10d::ProcessGroup> control, Alarm* alarm);

  // A round begins for this rank, with what it has to say; wait() ends it.
  void say(const Answer& own);
  Answer wait();

  // Says at the end of a backward which parameters this rank used; hear_used() waits for what any
  // rank did, if it has to be known.
  void tell_used(const std::vector<bool>& flags);
  std::vector<bool> hear_used();

  // Every rank's list; all are as long as `own`.
  std::vector<PassCalls> gather(const PassCalls& own);
  // For each flag whether it is set on any rank. `what` names it in errors and outlives the rank's
  // ledger.
  std::vector<bool> any_rank(const std::vector<bool>& flags);
  std::vector<bool> any_rank(const std::vector<bool>& flags, const std::string& what);
  int rank() const {
    return static_cast<int>(collectives_.rank());
  }
  const Collectives& collectives() const {
    return collectives_;
  }

 private:
  Streams streams_;
  Collectives collectives_;
  at::Tensor message_, used_;
  PendingCollective round_, telling_;
};

} // namespace zerocore
