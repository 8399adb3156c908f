// Writes a file from bytes in any order, in large blocks and past the page cache, see Note [Past
// the page cache].
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

// Reserves the first `nbytes` of a new file, which become zeros, if the file system can. Later
// writes are then faster, and a full disk is an error here. Throws std::system_error.
void reserve(int file, int64_t nbytes);

// Thread-safe. Throws std::system_error with the errno of the failed call, and
// std::invalid_argument for bytes outside of the file.
class FileWriter {
 public:
  // The memory of the writer; it takes more only if incomplete blocks hold this much.
  static constexpr int64_t kRingNbytes = 12 * kBlockNbytes;

  // Writes to an open file, which the caller may close, and whose final size is `nbytes`.
  // StreamWay::Any writes a large file past the page cache. Throws EINVAL for StreamWay::Direct if
  // the file system has no direct writes.
  FileWriter(int file, int64_t nbytes, StreamWay way);

  // Writes `nbytes` at `offset`, and returns crc32(crc, data, nbytes). The caller writes each byte
  // of the file once. Throws the errors of earlier writes, too. Through the page cache it starts
  // long writes to the disk at once, so that a later fsync has little to do.
  uint32_t write(const void* data, size_t nbytes, int64_t offset, uint32_t crc);
  // Waits until the system has all bytes. Call it once, after every byte is written; the caller
  // calls fsync.
  void finish();
  // Returns the CRC-32 of each block of the file. If several writers share a file through the page
  // cache, the CRC-32 is the XOR of their sums: each writer skips the others' bytes.
  std::vector<uint32_t> sums() const;

  bool is_direct() const {
    return is_direct_;
  }

 private:
  struct OpenBlock { // a block with missing bytes
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

  Descriptor file_; // a duplicate of the caller's descriptor
  int64_t nbytes_;
  bool is_direct_;
  std::vector<std::atomic<uint32_t>> sums_; // by block: checksum of its bytes so far

  // Guarded by the queue's lock.
  std::map<int64_t, OpenBlock> open_; // by the block's index in the file
  std::string rest_; // the file's last bytes, too few for a direct write
  BlockQueue queue_; // complete blocks; destroyed first
};

} // namespace zerocore::io
