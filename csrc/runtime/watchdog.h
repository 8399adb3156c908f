// The thread that looks after the alarms of all models of this process.
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

namespace zerocore {

class Alarm;

// Sleeps but for a moment in every interval, and knows nothing of Python: it works while the
// interpreter's lock is held. The first alarm starts the thread and the end of the process stops
// it. A forked child has none of its parent's threads, and gets a watchdog of its own.
class Watchdog {
 public:
  static Watchdog& of_process();

  // Looks at the alarm at least once in `interval`.
  void add(std::shared_ptr<Alarm> alarm, std::chrono::milliseconds interval);
  // False if the alarm is that of the process that this one was forked from.
  bool remove(const Alarm* alarm);
  // Looks at all alarms now.
  void wake();
  // Names the collective that this process waits in for another model; empty if it waits in none.
  std::string waits_in_other_than(const Alarm& alarm);
  // Tells other ranks how the program ends; bounded, as their store may not answer.
  void note_end(const std::string& how);
  // Ends the thread; bounded.
  void stop();

 private:
  explicit Watchdog(pid_t process) : process_(process) {}

  void start();
  void run();
  bool is_of_this_process() const;

  const pid_t process_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Alarm>> alarms_;
  std::chrono::milliseconds interval_{1000};
  bool woken_ = false;
  std::optional<std::string> end_; // to be told
  bool stopping_ = false;
  bool finished_ = false;
  std::thread thread_;
};

} // namespace zerocore
