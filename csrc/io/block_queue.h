// Blocks of a file on their way between memory and the disk, and the threads that work on them.
//
// Note [Past the page cache]
// A block that is read into memory of large pages is a few requests of the disk; by way of the page
// cache, and into small pages, it is many, and the processor copies it once more. So bytes that are
// not in the cache are read past it (O_DIRECT). Bytes that are in the cache come from there. Large
// files are written past it, too: the cache would take as much new memory as the file has bytes,
// from what trains beside it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "io/system_calls.h"

namespace zerocore::io {

enum class StreamWay : uint8_t { Any, Cached, Direct }; // Any: past the page cache where it is best

constexpr int64_t kBlockNbytes = int64_t{2} << 20; // a large page
// Bytes that are summed and copied at a time: they fit a core's cache.
constexpr int64_t kSumNbytes = int64_t{256} << 10;

inline int64_t num_blocks_of(int64_t nbytes) {
  return (nbytes + kBlockNbytes - 1) / kBlockNbytes;
}

struct Block {
  int64_t index = 0; // in the file
  char* data = nullptr; // its first byte
  bool is_own = false; // memory of the queue
};

// Threads call pread and pwrite: with blocks of megabytes within 5 % of io_uring, which containers
// may forbid.
class BlockQueue {
 public:
  using Lock = std::unique_lock<std::mutex>;
  // Does one thing to a block, without the lock; false if there is nothing to do now.
  using Work = std::function<bool(Lock&)>;

  explicit BlockQueue(Work work) : work_(std::move(work)) {}
  // Waits for what threads are doing; they do nothing more.
  ~BlockQueue();

  Lock lock() {
    return Lock(mutex_);
  }

  // -- under the lock
  void start(size_t num_threads);
  // Memory for so many blocks more: of large pages, where the system has them, and taken once it is
  // touched.
  void add_memory(size_t num_blocks);
  std::vector<char*> free; // memory of a block each, the last one is taken first
  std::deque<Block> waiting; // for the threads
  // No thread does or has to do anything.
  bool is_idle() const {
    return num_working_ == 0 && waiting.empty();
  }
  void wake() {
    changed_.notify_all();
  }
  // Lets the lock go until it is so. Throws what a thread has thrown, which ends all of them.
  void wait_until(Lock& lock, const std::function<bool()>& is_so);
  // The same, but works as the threads do, and ends these in any case.
  void finish(Lock& lock, const std::function<bool()>& is_so);

 private:
  void work_until(Lock& lock, const std::function<bool()>& is_so);

  const Work work_;
  std::mutex mutex_; // of what follows
  std::condition_variable changed_;
  std::deque<Mapping> memory_;
  std::exception_ptr error_;
  size_t num_working_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

} // namespace zerocore::io
