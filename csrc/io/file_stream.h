// The bytes of a file, read once from its begin to its end by several threads, and their checksums.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/block_ring.h"

namespace zerocore::io {

// Bytes of the file, and where they go; null: they are only summed.
struct Run {
  int64_t offset = 0;
  int64_t nbytes = 0;
  char* data = nullptr;
};

// For one thread. Throws std::system_error with the errno of what failed, whose text names the
// file.
class FileStream {
 public:
  // Opens the file. Past the page cache its first `ahead_nbytes` are read while nobody has asked
  // for them yet; from the cache `num_threads` read. Throws EINVAL for StreamWay::Direct where the
  // file system has no such reads.
  FileStream(std::string path, int64_t ahead_nbytes, size_t num_threads, StreamWay way);
  // Waits for what is under way; nothing more is read.
  ~FileStream();
  FileStream(const FileStream&) = delete;
  FileStream& operator=(const FileStream&) = delete;

  // Once: reads the runs, which come in the order of the file and have no byte in common, and
  // returns their checksums. Throws EIO if the file ends before one does; std::invalid_argument
  // for other orders and a second call.
  std::vector<uint32_t> read(std::vector<Run> runs);

  bool is_direct() const {
    return is_direct_;
  }

 private:
  struct Block {
    int64_t index = 0;
    char* data = nullptr; // its first byte
    bool is_in_ring = false; // else where it belongs
  };
  struct Part { // of a run, within a block
    size_t run = 0;
    uint32_t crc = 0;
    uint64_t nbytes = 0;
  };

  void start();
  void stop();
  void work();
  bool may_read() const;
  void read_next(std::unique_lock<std::mutex>& lock);
  void sum_next(std::unique_lock<std::mutex>& lock);
  char* place_of(int64_t index) const;
  void fill(const Block& block) const;
  std::vector<Part> sum(const Block& block) const;
  size_t first_run_behind(int64_t offset) const;
  std::vector<uint32_t> joined() const;

  std::string path_;
  size_t num_threads_;
  BlockRing ring_; // of blocks that are not read to their place
  int file_ = -1;
  bool is_direct_ = false;
  int64_t file_nbytes_ = 0;

  std::mutex mutex_; // what follows, while there are threads
  std::condition_variable changed_;
  bool stopping_ = false;
  bool asked_ = false; // runs_ and the size of parts_ stay
  std::vector<Run> runs_;
  std::vector<std::vector<Part>> parts_; // of each block
  std::exception_ptr error_;
  int64_t next_ = 0; // block that nobody reads yet
  int64_t end_ = 0; // behind the last one
  size_t num_reads_ = 0; // under way
  std::vector<char*> free_; // blocks of the ring
  std::deque<Block> waiting_; // read, not summed
  std::vector<std::thread> threads_; // last: they use what is above
};

} // namespace zerocore::io
