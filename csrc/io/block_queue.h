// Blocks of a file on their way between memory and the disk, and the threads that work on them.
//
// Note [Past the page cache]
// Reading a block into memory of large pages takes a few requests to the disk. Through the page
// cache, or into small pages, it takes many, and the processor copies the block as well. So bytes
// that are not in the cache are read past it (O_DIRECT), and cached bytes come from the cache.
// Large files are written past the cache, too: otherwise the cache would take memory of the file's
// size away from the training.
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

enum class StreamWay : uint8_t { Any, Cached, Direct }; // Any: past the page cache if faster

constexpr int64_t kBlockNbytes = int64_t{2} << 20; // a large page
// Bytes that are summed and copied at a time: they fit into a core's cache.
constexpr int64_t kSumNbytes = int64_t{256} << 10;

inline int64_t num_blocks_of(int64_t nbytes) {
  return (nbytes + kBlockNbytes - 1) / kBlockNbytes;
}

struct Block {
  int64_t index = 0; // index of the block in the file
  char* data = nullptr; // the first byte
  bool is_own = false; // the memory is the queue's
};

// A queue of blocks, and threads that call pread and pwrite. With blocks of megabytes this is
// within 5 % of io_uring, which containers may forbid.
class BlockQueue {
 public:
  using Lock = std::unique_lock<std::mutex>;
  // Processes one block with the lock released; returns false if there is nothing to do now.
  using Work = std::function<bool(Lock&)>;

  explicit BlockQueue(Work work) : work_(std::move(work)) {}
  // Joins the threads after their current work.
  ~BlockQueue();

  Lock lock() {
    return Lock(mutex_);
  }

  // -- call these with the lock held
  void start(size_t num_threads);
  // Adds memory for `num_blocks` blocks, of large pages if the system has them. The memory is taken
  // at the first access.
  void add_memory(size_t num_blocks);
  std::vector<char*> free; // unused memory by block; the last entry is taken first
  std::deque<Block> waiting; // for the threads
  // Returns whether no thread works and no block waits.
  bool is_idle() const {
    return num_working_ == 0 && waiting.empty();
  }
  void wake() {
    changed_.notify_all();
  }
  // Releases the lock until is_so() holds. Throws a thread's error, which ends all threads.
  void wait_until(Lock& lock, const std::function<bool()>& is_so);
  // wait_until() that also processes blocks; then joins the threads, even on an error.
  void finish(Lock& lock, const std::function<bool()>& is_so);

 private:
  void work_until(Lock& lock, const std::function<bool()>& is_so);

  const Work work_;
  std::mutex mutex_; // guards the members below
  std::condition_variable changed_;
  std::deque<Mapping> memory_;
  std::exception_ptr error_;
  size_t num_working_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

} // namespace zerocore::io
