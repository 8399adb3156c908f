// The alarm of one model: when ranks disagree, all of them throw one error that says where each is.
//
// Note [Alarm]
// The alarm is due when a collective fails, or when the host has waited in one for too long. This
// rank notices that by itself. The ranks then tell each other where they are, in a roll call, and
// one of them writes the sentence that all throw. If the store does not answer in time, the
// sentence says what this rank knows. The alarm closes the connections of the model's groups. A
// thread that waits in one of their collectives then gets an error, no collective writes to a
// buffer any more, and the process can exit. The alarm also prints the sentence, because the
// waiting thread may not come to throw it. Every later use of the model throws it. A rank that
// waits calls the roll earlier, too, and again whenever its wait has doubled. If the reports prove
// that ranks wait for each other, the alarm comes at once.
#pragma once

#include <sys/types.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "watch/ledger.h"
#include "watch/roll_call.h"

namespace zerocore {

struct AlarmOptions {
  std::string name; // the model's, equal on its ranks and unique; ends with its class
  size_t rank = 0; // this rank's number among all ranks of the model
  size_t size = 1;
  std::optional<double>
      stall_seconds; // how long a collective may take; by default as its group says
};

class Alarm {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // `groups`: the first carries control messages. Its store and its timeout are used.
  Alarm(AlarmOptions options, const std::vector<Group>& groups, std::vector<std::string> params);

  Ledger& ledger() {
    return ledger_;
  }
  // Returns the counts of the model's collectives on the group.
  LedgerGroup* in_ledger(c10d::ProcessGroup& group);
  // Makes the alarm close this group's connections, too.
  void add_group(const Group& group);
  bool has_group(const std::string& name) const;

  // -- the threads that use the model
  bool is_raised() const {
    return raised_;
  }
  // Throws c10::DistBackendError if the alarm was raised.
  void check() const {
    if (raised_.load(std::memory_order_acquire)) {
      throw_message();
    }
  }
  // Raises the alarm and throws it: a collective failed, or ranks disagree.
  [[noreturn]] void fail(const std::string& what);
  // Raises the alarm and returns: the caller throws an error that says more.
  void note_failure(const std::string& what);
  // Notes that a thread waits in a collective that is not in the ledger. Returns a token for
  // leave().
  int64_t enter(std::string what);
  void leave(int64_t token);

  // -- the thread that watches, which must not block
  void tick();
  // -- the thread that talks to stores
  // Looks at the store for a roll call. Returns whether one is open.
  bool talk();
  // Tells the other ranks that the program ends, and how.
  void note_end(const std::string& how);

  // -- any thread
  std::chrono::milliseconds interval() const;

 private:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;
  struct Wait {
    std::string what;
    Clock::time_point since;
  };

  [[noreturn]] void throw_message() const;
  RankReport own_report() const;
  std::string waits_in() const;
  RankReport report() const;
  std::string advice() const;
  std::string describe(const std::vector<RankReport>& reports, bool must_end) const;
  void raise_alone();
  void raise(std::string message);
  void close_groups();

  const AlarmOptions options_;
  const std::vector<std::string> params_;
  const std::string model_; // class of the model
  Seconds limit_{};
  bool limit_is_timeout_ = true; // the limit is the group's timeout, at which collectives fail
  Ledger ledger_;
  RollCall roll_call_; // used by the thread that talks

  std::atomic<bool> raised_ = false;
  mutable std::mutex mutex_; // guards all members below
  std::condition_variable changed_;
  std::vector<std::string> group_names_;
  // Weak: the destructor of a group joins threads, so the alarm's threads must not run it.
  std::vector<c10::weak_intrusive_ptr<c10d::Backend>> backends_;
  std::map<int64_t, Wait> waits_; // by token
  int64_t num_waits_ = 0;
  Seconds silence_{}; // how long the host has waited, at the last tick
  Seconds next_call_{}; // the silence at which this rank calls the roll next
  std::optional<Clock::time_point> must_end_; // when the alarm became due
  std::string cause_; // the collective that failed on this rank, if the alarm began with it
  bool in_call_ = false;
  std::string message_; // written once, before raised_
};

// The two threads that serve the alarms of a process. They do not use Python, so they run while
// another thread holds the interpreter's lock. One watches and never blocks. The other talks to
// stores, which may block it for ever: when a request to a store times out, c10d withdraws it and
// waits for the answer without a limit. The first alarm starts the threads, and the end of the
// process stops them. A forked child has no threads of its parent, and gets a watchdog of its own.
class Watchdog {
 public:
  static Watchdog& of_process();

  // Makes the threads look at the alarm, at least once in its interval.
  void add(std::shared_ptr<Alarm> alarm);
  // Returns false if the alarm belongs to the process that this one was forked from.
  bool remove(const Alarm* alarm);
  std::vector<std::shared_ptr<Alarm>> alarms();
  // Returns the first alarm that watches the group; null if there is none.
  std::shared_ptr<Alarm> alarm_of(const std::string& group);
  // Adds `group` to the alarms that watch the group `beside`.
  void add_group(const std::string& group, const std::string& beside);
  // Makes the threads look at all alarms now.
  void wake() {
    changed_.notify_all();
  }
  // Tells other ranks how the program ends. Returns after a moment even if the store does not
  // answer.
  void note_end(const std::string& how);
  // Ends the threads. Leaves one behind that a store still blocks.
  void stop();

 private:
  explicit Watchdog(pid_t process) : process_(process) {}

  void run(bool talks);

  const pid_t process_;
  std::mutex mutex_; // locked before an alarm's mutex
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Alarm>> alarms_;
  std::chrono::milliseconds interval_{1000};
  std::optional<std::string> end_; // how the program ends, until the other ranks are told
  bool stopping_ = false;
  std::vector<std::thread> threads_;
  size_t num_running_ = 0;
};

} // namespace zerocore
