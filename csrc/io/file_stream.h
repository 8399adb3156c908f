// Reads the blocks of a file once, in order, with several threads, and computes their checksums.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/block_queue.h"

namespace zerocore::io {

// Bytes of the file, and their destination.
struct Run {
  int64_t offset = 0;
  int64_t nbytes = 0;
  char* data = nullptr;
};

// For one thread. Throws std::system_error with the errno of the failed call; the text names the
// file.
class FileStream {
 public:
  // Opens the file to read its blocks from `first_block` to `end_block`, or to its end. Direct
  // reads of the first `ahead_nbytes` begin before read(). `num_threads` read through the cache.
  // Throws EINVAL for StreamWay::Direct if the file system has no direct reads.
  FileStream(
      std::string path,
      int64_t ahead_nbytes,
      size_t num_threads,
      StreamWay way,
      int64_t first_block,
      int64_t end_block);

  // Reads all blocks and returns the CRC-32 of each; call it once. The runs must be sorted by their
  // place in the file and must not overlap. Throws EIO if the blocks end before a run does, and
  // std::invalid_argument for a wrong order or a second call.
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
  int64_t end_; // one after the last block

  // Guarded by the queue's lock.
  bool asked_ = false; // read() was called: runs_ no longer change
  std::vector<Run> runs_;
  std::vector<uint32_t> sums_; // by block
  size_t num_summed_ = 0;
  int64_t next_; // the first block that no thread reads yet
  size_t num_reads_ = 0; // running reads
  BlockQueue queue_; // blocks that are read but not summed; destroyed first
};

} // namespace zerocore::io
