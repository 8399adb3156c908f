// The alarm of one model: when ranks disagree, all throw one error that says where each rank is.
//
// Note [Alarm]
// The alarm is due when a collective fails, or when the host has waited in one for too long. Each
// rank notices this itself. The ranks then report their positions in a roll call, and one of them
// writes the sentence that all ranks throw. If the store does not answer in time, the sentence says
// only what this rank knows. The alarm closes the connections of the model's groups. A thread that
// waits in one of their collectives then gets an error, no collective writes to a buffer any more,
// and the process can exit. The alarm also prints the sentence, because the waiting thread may
// never throw it. Every later use of the model throws it. A rank that waits also calls the roll
// earlier, and again whenever its wait has doubled. If the reports prove that ranks wait for each
// other, the alarm is raised at once.
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
  std::string name; // the model's name, equal on its ranks and unique; ends with its class
  size_t rank = 0; // this rank's number among all ranks of the model
  size_t size = 1;
  std::optional<double>
      stall_seconds; // how long a collective may take; by default as its group says
};

class Alarm {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // `groups`: the first one carries control messages; the alarm uses its store and its timeout.
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
  // Raises the alarm and returns; the caller throws its own error, which says more.
  void note_failure(const std::string& what);
  // Records that a thread waits in a collective outside of the ledger. Returns a token for leave().
  int64_t enter(std::string what);
  void leave(int64_t token);

  // -- the watching thread, which must not block
  void tick();
  // -- the thread that talks to stores
  // Checks the store for a roll call. Returns whether one is open.
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
  RollCall roll_call_; // only the thread that talks to stores uses it

  std::atomic<bool> raised_ = false;
  mutable std::mutex mutex_; // guards all members below
  std::condition_variable changed_;
  std::vector<std::string> group_names_;
  // Weak, because a group's destructor joins threads, and the alarm's threads must not run it.
  std::vector<c10::weak_intrusive_ptr<c10d::Backend>> backends_;
  std::map<int64_t, Wait> waits_; // by token
  int64_t num_waits_ = 0;
  Seconds silence_{}; // length of the host's wait at the last tick
  Seconds next_call_{}; // length of the wait at which this rank next calls the roll
  std::optional<Clock::time_point> must_end_; // when the alarm became due
  std::string cause_; // the failed collective of this rank, if it caused the alarm
  bool in_call_ = false;
  std::string message_; // written once, before raised_
};

// The two threads that serve the alarms of a process. They use no Python, so they run while another
// thread holds the interpreter's lock. One watches and never blocks. The other one talks to stores,
// which may block it for ever: when a request to a store times out, c10d withdraws it and waits for
// the answer without a limit. The first alarm starts the threads; the end of the process stops
// them. A forked child has no threads of its parent, so it gets its own watchdog.
class Watchdog {
 public:
  static Watchdog& of_process();

  // Makes the threads check the alarm, at least once per interval of the alarm.
  void add(std::shared_ptr<Alarm> alarm);
  // Returns false if the alarm belongs to the parent of this forked process.
  bool remove(const Alarm* alarm);
  std::vector<std::shared_ptr<Alarm>> alarms();
  // Returns the first alarm that watches the group; null if there is none.
  std::shared_ptr<Alarm> alarm_of(const std::string& group);
  // Adds `group` to the alarms that watch the group `beside`.
  void add_group(const std::string& group, const std::string& beside);
  // Makes the threads check all alarms now.
  void wake() {
    changed_.notify_all();
  }
  // Tells other ranks how the program ends. Returns after a short wait if the store does not
  // answer.
  void note_end(const std::string& how);
  // Stops the threads, except one that a store still blocks.
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
