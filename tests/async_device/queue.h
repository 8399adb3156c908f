// Streams that are threads: each carries out its tasks one after the other, behind the host.
//
// A task sees memory by address, as a kernel does: nothing keeps alive what it reads. Events are
// points between tasks. An error of a task is thrown at the host where it next waits.
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

constexpr int kNumStreams = 16; // of which the first one is the default

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

  // `delayed`: whether it is work, which may be late, and not a wait or a mark.
  void push(Task task, bool delayed = true);
  PointPtr record();
  void wait_for(const PointPtr& point);
  bool is_idle();
  void set_delays(const Delays& delays);
  // Every task from here on begins that much later; 0 ends it.
  void set_lag(int us);
  // A task of this stream is late in the middle of its work.
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

// The process's streams. They are started when they are first asked for, and never end.
Queue& queue(int id);
// The stream whose task runs on this thread.
Queue& working_queue();
// The next stream of those that are lent in turn.
int next_stream();
void set_delays(const Delays& delays);

// By thread.
int current_stream();
int exchange_stream(int id);

// The stream that says that it records a graph, or -1. It carries out its tasks all the same.
std::atomic<int>& capturing_stream();

// -- recorded work
// --------------------------------------------------------------------------------

// Work of a thread, to be given to a stream again as it is: with the addresses that it had. Like a
// captured graph it may wait for nothing, and the memory that it allocated is never another's.
struct Recording {
  std::vector<Task> tasks;
};

// Gives the current stream work.
void launch(Task task);
// From here on this thread's launches are also recorded.
void begin_recording();
std::shared_ptr<Recording> end_recording();
bool is_recording();
// Throws while this thread records; `what` would wait, or let others wait.
void check_not_recording(const char* what);

// -- the host waits
// --------------------------------------------------------------------------------

// This thread has said which device it works with.
void choose_device() noexcept;
// The host is about to wait for the device, in `what`: counted, and an error where it is forbidden.
// Also counted are those of threads without a device, which on GPUs take memory of the first one.
void note_host_wait(const char* what);
void forbid_host_waits(bool forbidden);
std::vector<std::pair<std::string, int64_t>> host_waits();
void wait_for_stream(int id); // throws what a task threw
void wait_for_point(const PointPtr& point);
void wait_for_device();
void check_error(); // throws what a task threw

// -- planted faults
// --------------------------------------------------------------------------------

constexpr int kHost = -1; // that waits for an event

// A wait that a stream was told to make for another, or that the host makes for one.
struct Wait {
  int waiter;
  int source;
};

// From now on waits are noted; number `dropped` of them (-1: none) is not made. Those of streams
// come first; those of the host, which other threads may make meanwhile, are numbered by
// themselves.
void begin_waits(int64_t dropped, int64_t dropped_of_host);
std::vector<Wait> end_waits();
// True if the stream is to make this wait.
bool note_wait(const Wait& wait);

} // namespace async_device
