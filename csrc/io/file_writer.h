// A file whose bytes come in any order and go to the disk in large blocks, past the page cache: see
// Note [Past the page cache].
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "io/block_queue.h"

namespace zerocore::io {

// Takes the room of the first `nbytes` of a new file at once, which then are zeros, where the file
// system can: writing them has less to do, and a full disk is an error before. Throws
// std::system_error.
void reserve(int file, int64_t nbytes);

// Any thread, several at a time. Throws std::system_error with the errno of what failed;
// std::invalid_argument for bytes outside of the file.
class FileWriter {
 public:
  // Memory that is taken; more only where that much of the file is given in part and waits for the
  // rest.
  static constexpr int64_t kRingNbytes = 12 * kBlockNbytes;

  // Of an open file that the caller may close, and that in the end has `nbytes`. StreamWay::Any: a
  // large one goes past the page cache. Throws EINVAL for StreamWay::Direct where the file system
  // has no such writes.
  FileWriter(int file, int64_t nbytes, StreamWay way);

  // Takes `nbytes` for byte `offset` on, each of the file's once, and returns crc32(crc, data,
  // nbytes). Throws the errors of earlier writes, too. By way of the page cache the disk begins
  // with long writes at once, so that a later fsync finds little left.
  uint32_t write(const void* data, size_t nbytes, int64_t offset, uint32_t crc);
  // Once, when every byte was given: waits until the system has them all. fsync is the caller's.
  void finish();
  // CRC-32 of each block of the file. If several writers share a file by way of the page cache, the
  // XOR of their sums: each takes the bytes of the others for none.
  std::vector<uint32_t> sums() const;

  bool is_direct() const {
    return is_direct_;
  }

 private:
  struct OpenBlock { // has not got all its bytes
    char* data = nullptr;
    int64_t missing = 0;
  };

  char* place_of(int64_t index);
  void add(int64_t index, int64_t nbytes);
  bool write_next(BlockQueue::Lock& lock);
  void note(int64_t offset, uint32_t crc, int64_t nbytes);
  int64_t nbytes_of(int64_t index) const {
    return std::min(kBlockNbytes, nbytes_ - index * kBlockNbytes);
  }

  Descriptor file_; // its own
  int64_t nbytes_;
  bool is_direct_;
  std::vector<std::atomic<uint32_t>> sums_; // of each block, of the bytes so far

  // Under the lock of the queue.
  std::map<int64_t, OpenBlock> open_; // by the block's place in the file
  std::string rest_; // the last bytes of the file, fewer than what direct writes are made of
  BlockQueue queue_; // of complete blocks; goes first
};

} // namespace zerocore::io
