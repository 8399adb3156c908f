// Small messages between the ranks of a model about the calls of a pass, on the CPU only.
//
// See Note [One order on every rank] in plan/schedule.h. Ranks answer in rounds: each says which
// unit it needs or that it has left the pass, and all hear which unit is served next.
//
// Note [Static graphs]
// The program may promise that in each pass all ranks do the same. A pass with new calls, and new
// flags, are then said by all ranks, and all learn what follows; known ones send nothing. A rank
// that breaks the promise says something alone, or issues a collective alone, and waits until the
// alarm.
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
    std::optional<UnitId> wanted = {}; // the first unit in registration that any rank needs
    uint64_t calls = 0; // of `own`: a number for the calls that this rank has made
    bool calls_differ = false;
    std::vector<bool> needs = {}; // by call, whether any rank needs its backward
    std::vector<bool> open = {}; // as many: see Schedule::open_calls
    std::optional<int> failed = {}; // the last rank whose forward raised
    bool reads = false; // on any rank a backward reads more than expected
    int64_t gathered = 0; // of `own`: a number for what this rank has gathered again
    bool gathers_differ = false;
    int64_t written = 0; // of `own`: a number for what this rank has written in place
    bool writes_differ = false;
  };

  // `control`: a gloo group of all ranks of the model. `alarm` may be null, and outlives the
  // channel otherwise.
  ControlChannel(
      const c10::intrusive_ptr<c10d::ProcessGroup>& control,
      Alarm* alarm,
      bool is_static);

  // See ControlLink. A refusal raises the alarm: another rank may have begun this backward first,
  // and waits for this one.
  void begin_backward(const std::shared_ptr<void>& running);
  // A round begins for this rank, with what it has to say; wait() ends it.
  void say(const Answer& own);
  Answer wait();

  // Says at the end of a backward which parameters this rank used; hear_used() waits for what any
  // rank did, if it has to be known.
  void tell_used(const std::vector<bool>& flags);
  std::vector<bool> hear_used();

  // For each flag whether it is set on any rank. Blocks. AnyFlags, or OptimizerFlags.
  std::vector<bool> any_rank(const std::vector<bool>& flags, MessageKind kind);
  // Which numbers are not the same on all ranks that have the same number of sharers. Blocks.
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
  // Messages that this rank has begun.
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
  // The flags of all ranks are on their way, unless they are known.
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
  size_t num_needs_ = 0; // of the round under way
  Flags used_;
  // Of all ranks, by those of this one; see Note [Static graphs].
  std::map<std::pair<MessageKind, std::vector<bool>>, std::vector<bool>> known_;
};

// Connects this rank of the group of that name with those that it exchanges messages with;
// collective. Throws what the backend does if it cannot.
void connect_peers(const std::string& control);

} // namespace zerocore
