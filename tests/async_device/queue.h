// Streams that are threads: each runs its tasks one after the other, while the host goes on.
//
// A task reads memory by address, as a kernel does, and keeps nothing alive. Events are points
// between tasks. The host throws the error of a task where it next waits.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace async_device {

using Task = std::function<void()>;
using Clock = std::chrono::steady_clock;

constexpr int kNumStreams = 16; // the first one is the default

// A point in a stream's tasks. Thread-safe.
class Point {
 public:
  explicit Point(int stream) : stream(stream) {}
  void reach();
  void wait();
  bool is_reached();
  Clock::time_point time(); // once it is reached

  const int stream;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  Clock::time_point time_;
};

using PointPtr = std::shared_ptr<Point>;

// Sleeps before tasks, drawn by each stream from the seed and its own number.
struct Delays {
  uint64_t seed = 0;
  double share = 0; // of the tasks
  int longest_us = 0;
};

class Queue {
 public:
  explicit Queue(int id);

  // `delayed`: whether the task is work, which may be late, and not a wait or an event.
  void push(Task task, bool delayed = true);
  PointPtr record();
  void wait_for(const PointPtr& point);
  bool is_idle();
  void set_delays(const Delays& delays);
  // Makes all later work begin that much later; 0 ends it.
  void set_lag(int us);
  // Delays this stream's current task in the middle of its work.
  void pause();

  const int id;

 private:
  struct Item {
    Task run;
    bool delayed;
  };

  void work();
  int draw_delay(); // microseconds

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool busy_ = false;
  Delays delays_;
  int lag_us_ = 0;
  std::mt19937_64 random_;
  std::thread thread_;
};

// Returns a stream of the process. The first call starts it; it never ends.
Queue& queue(int id);
// Returns the stream whose task runs on this thread.
Queue& working_queue();
// Returns the next stream of all but the default, in turn.
int next_stream();
void set_delays(const Delays& delays);

// Each thread has a current stream.
int current_stream();
int exchange_stream(int id);

// The stream that claims to record a graph, or -1. It runs its tasks all the same.
std::atomic<int>& capturing_stream();

// -- recorded work --------------------------------------------------------------------------------

// A thread's launches, which a stream can run again with the same addresses. Like a captured graph
// it contains no waits, and the memory that it allocated is never reused.
struct Recording {
  std::vector<Task> tasks;
};

// Gives the current stream a task.
void launch(Task task);
// Begins to record this thread's launches, which run all the same.
void begin_recording();
std::shared_ptr<Recording> end_recording();
bool is_recording();
// Throws while this thread records; `what` would wait, or let others wait.
void check_not_recording(const char* what);

// -- the host waits -------------------------------------------------------------------------------

// Notes that this thread has chosen a device.
void choose_device() noexcept;
// Counts a wait of the host in `what`, and throws if waits are forbidden. Waits of threads without
// a device are also counted by themselves: on GPUs such threads take memory of the first device.
void note_host_wait(const char* what);
void forbid_host_waits(bool forbidden);
std::vector<std::pair<std::string, int64_t>> host_waits();
void wait_for_stream(int id); // throws a task's error
void wait_for_point(const PointPtr& point);
void wait_for_device();
void check_error(); // throws a task's error

// -- planted faults -------------------------------------------------------------------------------

constexpr int kHost = -1; // the waiter, if the host waits for an event

// A wait of a stream, or of the host, for a stream.
struct Wait {
  int waiter;
  int source;
};

// Begins to note waits. Skips number `dropped` of the streams' waits, and number `dropped_of_host`
// of the host's (-1: none). The host's have their own numbers, because other threads may make some.
// end_waits() returns the streams' waits first.
void begin_waits(int64_t dropped, int64_t dropped_of_host);
std::vector<Wait> end_waits();
// Notes a wait; returns false if it is to be skipped.
bool note_wait(const Wait& wait);

} // namespace async_device
