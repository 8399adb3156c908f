// Blocks of a file, read once in their order by several threads, and the checksum of each.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/block_queue.h"

namespace zerocore::io {

// Bytes of the file, and where they go.
struct Run {
  int64_t offset = 0;
  int64_t nbytes = 0;
  char* data = nullptr;
};

// For one thread. Throws std::system_error with the errno of what failed, whose text names the
// file.
class FileStream {
 public:
  // Opens the file to read its blocks `first_block` to `end_block`, or to its end. Past the page
  // cache the first `ahead_nbytes` are read before read() asks for them; from the cache
  // `num_threads` read. Throws EINVAL for StreamWay::Direct where the file system has no such
  // reads.
  FileStream(
      std::string path,
      int64_t ahead_nbytes,
      size_t num_threads,
      StreamWay way,
      int64_t first_block,
      int64_t end_block);

  // Once: reads all blocks and returns the CRC-32 of each. The runs come in the order of the file
  // and have no byte in common. Throws EIO if the blocks end before a run does;
  // std::invalid_argument for other orders and a second call.
  std::vector<uint32_t> read(std::vector<Run> runs);

  bool is_direct() const {
    return is_direct_;
  }

 private:
  bool work(BlockQueue::Lock& lock);
  bool may_read() const;
  void read_next(BlockQueue::Lock& lock);
  void sum_next(BlockQueue::Lock& lock);
  char* place_of(int64_t index) const;
  void fill(const Block& block) const;
  uint32_t sum(const Block& block) const;
  void copy_out(const Block& block, int64_t begin, int64_t end) const;
  size_t first_run_behind(int64_t offset) const;

  const std::string path_;
  size_t num_threads_;
  Descriptor file_;
  bool is_direct_ = false;
  int64_t file_nbytes_ = 0;
  int64_t first_; // block
  int64_t end_; // behind the last one

  // Under the lock of the queue.
  bool asked_ = false; // runs_ stay
  std::vector<Run> runs_;
  std::vector<uint32_t> sums_; // of each block
  size_t num_summed_ = 0;
  int64_t next_; // block that nobody reads yet
  size_t num_reads_ = 0; // under way
  BlockQueue queue_; // of blocks that are read, and not summed; goes first
};

} // namespace zerocore::io
