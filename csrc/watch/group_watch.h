// The alarm of the models of the same ranks: ranks that disagree get one error that names what each
// of them is in.
//
// Note [Alarm]
// A collective that the host waits in for too long, or that fails, is noticed by the watchdog's
// thread, without asking anybody. Another thread, which may block in the store, calls the roll: all
// ranks answer within a second, and have one sentence. If the store does not answer in time the
// sentence is of what this rank knows. The watchdog closes the connections of all groups that it
// knows: what waits in one of their collectives ends with an error, nothing writes to their buffers
// any more, and the process can exit. It also prints the sentence, as the thread that waits may not
// get to. From then on every use of the models throws it.
// A rank that waits for some seconds calls the roll, too, and again after twice as long. The ranks
// then wait on, unless their reports prove that some wait for ever.
#pragma once

#include <sys/types.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "watch/ledger.h"
#include "watch/roll_call.h"

namespace zerocore {

// One for a control group, and alive as long as it or a model.
class GroupWatch {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // `name`: the same on all ranks of the group, and no other watch's.
  GroupWatch(const std::string& name, const Group& control);

  bool is_of(const Group& control) const;
  // Whether the control group was destroyed.
  bool is_over() const {
    return backends_.front().expired();
  }
  // The alarm closes its connections, too.
  void add_group(const Group& group);
  bool has_group(const std::string& name) const;
  // The ledger of one more model, the same on all ranks; its collectives may take `stall_seconds`,
  // by default as long as the group says.
  void add(Ledger& ledger, std::optional<double> stall_seconds);
  void remove(const Ledger& ledger);

  // -- the threads that use the models
  bool is_raised() const {
    return raised_;
  }
  // Throws c10::DistBackendError if the alarm was raised.
  void check() const {
    if (raised_.load(std::memory_order_acquire)) {
      throw_message();
    }
  }
  // A collective failed, or ranks were seen to disagree: raises the alarm and throws it.
  [[noreturn]] void fail(const std::string& what);
  // Raises the alarm and goes on: the caller has an error that says more.
  void note_failure(const std::string& what);
  // A thread waits for other ranks of a group in a collective that is not in a ledger; a token for
  // leave().
  int64_t enter(const std::string& what, const std::string& group);
  void leave(int64_t token);

  // -- the watchdog, which must not block
  void tick();
  // -- the thread that talks to stores
  void talk();
  bool is_talking() const {
    return roll_call_.is_under_way();
  }
  // The program or the group ends, after this error; empty for none.
  void note_end(const std::string& error);

  // -- any thread
  // Names what the process waits in; empty if it waits in nothing.
  std::string waits_in() const;
  std::chrono::milliseconds interval() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Wait {
    int64_t token = 0;
    Clock::time_point since;
    NamedWait wait;
  };

  [[noreturn]] void throw_message() const;
  Silence silence();
  RankReport report() const;
  std::string conclude(const std::vector<RankReport>& reports) const;
  std::string describe_alone() const;
  std::string advice() const;
  ParamNames params() const;
  void raise(std::string message);
  void close_groups();

  const pid_t process_; // that the threads are of; a fork has none
  const size_t rank_, size_;
  RollCall roll_call_; // of the thread that talks

  std::atomic<bool> raised_ = false;
  mutable std::mutex mutex_; // of all that follows
  std::condition_variable changed_;
  double limit_ = 0; // seconds
  bool limit_is_timeout_ = true; // the group's, at which its collectives fail
  std::map<std::string, bool> groups_; // by name: whether it has all ranks
  // The watchdog must not be the last owner: a group's end joins threads. The first is that of the
  // control group.
  std::vector<c10::weak_intrusive_ptr<c10d::Backend>> backends_;
  std::map<int64_t, Ledger*> ledgers_; // by id of the model
  int64_t num_models_ = 0; // that there have been
  std::vector<Wait> waits_;
  std::vector<NamedWait> begun_;
  int64_t num_waits_ = 0;
  int64_t silent_in_ = -1; // a number as of silence()
  Clock::duration ask_after_{}; // silence in it
  bool asks_ = false;
  std::optional<Clock::time_point> overdue_since_;
  std::string cause_; // what failed here, if that was first
  std::string sentence_; // of the alarm, once all ranks have it
  std::string message_; // written once, before raised_
};

} // namespace zerocore
