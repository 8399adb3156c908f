// The alarm of one model: ranks that disagree get one error that names what each of them is in.
//
// Note [Alarm]
// A collective that the host waits in for too long, or that fails, is noticed here, without asking
// anybody. Then a roll call gives all ranks one sentence. If the store does not answer in time the
// sentence is of what this rank knows. The alarm closes the connections of all groups that it
// knows: what waits in one of their collectives ends with an error, nothing writes to their buffers
// any more, and the process can exit. It also prints the sentence, as the thread that waits may not
// get to. From then on every use of the model throws it.
// Before, and whenever the silence has doubled, a rank that waits calls the roll, too: if it proves
// that the ranks wait for each other the alarm comes at once.
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
  std::string name; // of the model, the same on all its ranks and no other's; ends with its class
  size_t rank = 0; // among all ranks of the model
  size_t size = 1;
  std::optional<double>
      stall_seconds; // how long a collective may take; by default as its group says
};

class Alarm {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // The first of `groups` carries control messages; its store and its default for the limit count.
  Alarm(AlarmOptions options, const std::vector<Group>& groups, std::vector<std::string> params);

  Ledger& ledger() {
    return ledger_;
  }
  // Counts the model's collectives on the group.
  LedgerGroup* in_ledger(c10d::ProcessGroup& group);
  // The alarm closes its connections, too.
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
  // A collective failed, or ranks were seen to disagree: raises the alarm and throws it.
  [[noreturn]] void fail(const std::string& what);
  // Raises the alarm and goes on: the caller has an error that says more.
  void note_failure(const std::string& what);
  // A thread waits for other ranks in a collective that is not in the ledger; a token for leave().
  int64_t enter(std::string what);
  void leave(int64_t token);

  // -- the thread that watches, which must not block
  void tick();
  // -- the thread that talks to stores
  // True while a roll call is open.
  bool talk();
  // The program ends: `how` is for the others.
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
  const std::string model_; // its class
  Seconds limit_{};
  bool limit_is_timeout_ = true; // the group's, at which its collectives fail
  Ledger ledger_;
  RollCall roll_call_; // of the thread that talks

  std::atomic<bool> raised_ = false;
  mutable std::mutex mutex_; // of all that follows
  std::condition_variable changed_;
  std::vector<std::string> group_names_;
  // The alarm's threads must not be the last owner: a group's end joins threads.
  std::vector<c10::weak_intrusive_ptr<c10d::Backend>> backends_;
  std::map<int64_t, Wait> waits_; // by token
  int64_t num_waits_ = 0;
  Seconds silence_{}; // as of the last tick
  Seconds next_call_{}; // at that silence
  std::optional<Clock::time_point> must_end_; // since then
  std::string cause_; // what failed here, if that was first
  bool in_call_ = false;
  std::string message_; // written once, before raised_
};

// Two threads that sleep but for a moment in every interval and know nothing of Python: they work
// while the interpreter's lock is held. One watches and never blocks; the other talks to stores, as
// no timeout bounds a request to one: after it, c10d waits for the answer to its withdrawal. The
// first alarm starts them and the end of the process stops them. A forked child has none of its
// parent's threads, and gets a watchdog of its own.
class Watchdog {
 public:
  static Watchdog& of_process();

  // Looks at the alarm at least once in its interval.
  void add(std::shared_ptr<Alarm> alarm);
  // False if the alarm is that of the process that this one was forked from.
  bool remove(const Alarm* alarm);
  std::vector<std::shared_ptr<Alarm>> alarms();
  // The one that has looked after the group for the longest time; null if there is none.
  std::shared_ptr<Alarm> alarm_of(const std::string& group);
  // The thread that looks after the group `beside` looks after this one, too.
  void add_group(const std::string& group, const std::string& beside);
  // Looks at all alarms now.
  void wake() {
    changed_.notify_all();
  }
  // Tells other ranks how the program ends; bounded, as their store may not answer.
  void note_end(const std::string& how);
  // Ends the threads; bounded.
  void stop();

 private:
  explicit Watchdog(pid_t process) : process_(process) {}

  void run(bool talks);

  const pid_t process_;
  std::mutex mutex_; // taken before that of an alarm
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Alarm>> alarms_;
  std::chrono::milliseconds interval_{1000};
  std::optional<std::string> end_; // to be told
  bool stopping_ = false;
  std::vector<std::thread> threads_;
  size_t num_running_ = 0;
};

} // namespace zerocore
