// Small messages about the calls of a pass between the ranks of a model; CPU only.
//
// See Note [One order on every rank] in plan/schedule.h. In each round every rank says which unit
// it needs, or that it has left the pass, and all ranks hear which unit they serve next.
//
// Note [Static graphs]
// The program may promise that all ranks do the same in each pass. Then ranks exchange only
// messages about new calls and flags, and remember the answers. A rank that breaks the promise
// sends a message alone, or issues a collective alone, and waits until the alarm.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/dissemination.h"
#include "watch/control_link.h"
#include "watch/issue_watch.h"

namespace zerocore {

class ControlChannel {
 public:
  struct Answer {
    std::optional<UnitId> wanted = {}; // the first unit, by registration, that any rank needs
    uint64_t calls = 0; // for say(): a hash of this rank's calls
    bool calls_differ = false;
    std::vector<bool> needs = {}; // by call, whether any rank needs its backward
    std::vector<bool> open = {}; // see Schedule::open_calls
    std::optional<int> failed = {}; // the highest rank whose forward raised
    bool reads = false; // on some rank a backward reads more than expected
    int64_t gathered = 0; // for say(): a hash of the units that this rank gathered again
    bool gathers_differ = false;
    int64_t written = 0; // for say(): a hash of this rank's writes in place
    bool writes_differ = false;
  };

  // `control`: a gloo group of all ranks of the model. `alarm` may be null; otherwise it must
  // outlive the object.
  ControlChannel(
      const c10::intrusive_ptr<c10d::ProcessGroup>& control,
      Alarm* alarm,
      bool is_static);

  // Calls ControlLink::begin_backward(). If that throws, raises the alarm: another rank may have
  // begun this backward first, and waits for this rank.
  void begin_backward(const std::shared_ptr<void>& running);
  // Begins a round with this rank's message; wait() ends the round and returns the answer.
  void say(const Answer& own);
  Answer wait();

  // At the end of a backward, tells the other ranks which parameters this rank used. If the flags
  // are needed, hear_used() waits for those of all ranks, combined by or.
  void tell_used(const std::vector<bool>& flags);
  std::vector<bool> hear_used();

  // Returns for each flag whether any rank sets it. Blocks. `kind` is AnyFlags or OptimizerFlags.
  std::vector<bool> any_rank(const std::vector<bool>& flags, MessageKind kind);
  // Returns by number whether it differs between ranks with equal entries in `sharers`. Blocks.
  std::vector<bool> differing(
      const std::vector<int64_t>& sharers,
      const std::vector<int64_t>& numbers);
  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  // See Note [Static graphs].
  bool is_static() const {
    return is_static_;
  }
  // Returns the number of messages that this rank has begun.
  uint64_t num_messages() const {
    return num_messages_;
  }

 private:
  // A message under way.
  struct Pending {
    WatchedCollective watched;
    ControlLink::Ticket round = nullptr;
  };

  Pending begin(ControlMessage own, const std::string& what);
  ControlMessage wait(Pending& pending);
  // Flags of a message; `pending` is empty if the answer is known.
  struct Flags {
    MessageKind kind = MessageKind::AnyFlags;
    std::vector<bool> own;
    Pending pending;
  };
  Flags tell(MessageKind kind, const std::vector<bool>& own);
  std::vector<bool> hear(Flags& flags);

  const std::shared_ptr<ControlLink> link_;
  const int rank_, size_;
  const int64_t user_;
  const bool is_static_;
  Alarm* alarm_;
  LedgerGroup* group_; // null without an alarm
  uint64_t num_messages_ = 0;
  Pending round_;
  size_t num_needs_ = 0; // of the running round
  Flags used_;
  // All ranks' flags, by this rank's flags; see Note [Static graphs].
  std::map<std::pair<MessageKind, std::vector<bool>>, std::vector<bool>> known_;
};

// Connects this rank of the group named `control` to the ranks that it exchanges messages with.
// Collective. Throws the backend's error if that fails.
void connect_peers(const std::string& control);

} // namespace zerocore
