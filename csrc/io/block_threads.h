// Blocks on their way between memory and open files, many at a time, for an owner that several
// threads use.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace zerocore::io {

struct Block {
  bool writes = false;
  int file = -1;
  char* data = nullptr;
  int64_t offset = 0;
  int64_t nbytes = 0;
};

// Threads that call pread and pwrite: with blocks of megabytes within 5 % of io_uring, which
// containers may forbid. Every call is made under the owner's lock.
class BlockThreads {
 public:
  // Takes the owner's tag of a block, and 0 or the errno of the rest of it that failed; called by
  // one of the threads, under the lock.
  using Done = std::function<void(int64_t tag, const Block& rest, int error)>;

  BlockThreads(std::mutex& mutex, size_t depth, Done done);
  // Waits for what is under way. Not under the lock.
  ~BlockThreads();

  bool is_full() const {
    return num_under_way_ == depth_;
  }
  bool is_idle() const {
    return num_under_way_ == 0;
  }
  // Does not wait. Not full.
  void begin(int64_t tag, const Block& block);
  // Lets the lock go until a block is done. Not idle.
  void wait_for_some(std::unique_lock<std::mutex>& lock) {
    moved_.wait(lock);
  }

 private:
  struct Tagged {
    int64_t tag = 0;
    Block block;
  };

  void work();

  std::mutex& mutex_;
  size_t depth_;
  Done done_;
  std::condition_variable begun_;
  std::condition_variable moved_;
  std::deque<Tagged> waiting_;
  size_t num_under_way_ = 0;
  bool stopping_ = false;
  std::vector<std::jthread> threads_; // last: they use what is above, and are joined first
};

} // namespace zerocore::io
