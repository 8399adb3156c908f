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

#include "watch/group_watch.h"

namespace zerocore {

// Two threads that sleep but for a moment in every interval and know nothing of Python: they work
// while the interpreter's lock is held. One watches and never blocks; the other talks to stores,
// which may block for ever. The first watch starts them and the end of the process stops them. A
// forked child has none of its parent's threads, and gets a watchdog of its own.
class Watchdog {
 public:
  using Watch = std::shared_ptr<GroupWatch>;

  static Watchdog& of_process();

  // The watch of a control group; `name` as of GroupWatch, if it has none yet.
  Watch watch_of(const GroupWatch::Group& control, const std::string& name);
  // The one that has looked after the group for the longest time; null if there is none.
  Watch find(const std::string& group);
  // The watch that looks after the group `beside` looks after this one, too.
  void add_group(const std::string& group, const std::string& beside);
  // Looks at all watches now; wake() also talks.
  void wake();
  void wake_watcher();
  // Names what this process waits in for other ranks; empty if it waits in nothing.
  std::string waits_in_other_than(const GroupWatch& watch);
  // The function that the main thread is in, such as "full_state_dict"; empty outside of such a one.
  void set_operation(std::string name);
  std::string operation();
  // How long the thread that talks to stores has been in the same round, which takes moments.
  std::chrono::steady_clock::duration talks_for();
  // Tells other ranks how the program ends; bounded, as their store may not answer.
  void note_end(const std::string& error);
  // Ends the threads; bounded.
  void stop();

 private:
  explicit Watchdog(pid_t process) : process_(process) {}

  void watch();
  void talk();
  void drop_ended();
  std::vector<Watch> watches();
  std::chrono::steady_clock::duration time_in_talk() const; // under the mutex

  const pid_t process_;
  std::mutex mutex_; // taken before that of a watch
  std::condition_variable changed_;
  std::vector<Watch> watches_;
  std::chrono::milliseconds interval_{1000};
  std::string operation_;
  std::optional<std::string> end_; // to be told
  std::optional<std::chrono::steady_clock::time_point> talks_since_;
  bool stopping_ = false, wakes_watcher_ = false, wakes_talker_ = false, has_ended_talking_ = false;
  std::thread watcher_, talker_;
};

} // namespace zerocore
