// The threads that look after the alarms of all models of this process.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "watch/ledger.h"

namespace zerocore {

class Alarm;

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
  // The one that has looked after the group for the longest time; null if there is none.
  std::shared_ptr<Alarm> alarm_of(const std::string& group);
  // The thread that looks after the group `beside` looks after this one, too.
  void add_group(const std::string& group, const std::string& beside);
  // Looks at all alarms now.
  void wake() {
    changed_.notify_all();
  }
  // Names what this process waits in for another model; empty if it waits in nothing.
  std::string waits_in_other_than(const Alarm& alarm);
  // The position of this process in each model whose collectives need all ranks.
  std::vector<ModelPosition> positions();
  // Tells other ranks how the program ends; bounded, as their store may not answer.
  void note_end(const std::string& how);
  // Ends the threads; bounded.
  void stop();

 private:
  explicit Watchdog(pid_t process) : process_(process) {}

  void run(bool talks);
  std::vector<std::shared_ptr<Alarm>> alarms();

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
