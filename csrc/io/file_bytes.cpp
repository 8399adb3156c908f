// Bytes of open files with their checksums.
#include "io/file_bytes.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "io/crc32.h"
#include "io/system_calls.h"

namespace zerocore::io {

namespace {

constexpr size_t kBlockNbytes = size_t{256} << 10; // fits the second-level cache
constexpr int64_t kFlushNbytes = int64_t{8} << 20;
// What is read at a time: large enough that the disk is busy where the system reads little ahead by
// itself. (posix_fadvise(WILLNEED) would read into small pages, which takes twice as long.)
constexpr size_t kReadNbytes = size_t{4} << 20;

void write_all(int file, const uint8_t* data, size_t nbytes, int64_t offset) {
  while (nbytes > 0) {
    const ssize_t count = ::pwrite(file, data, nbytes, offset);
    if (count < 0 && errno != EINTR) {
      fail_with(errno, "pwrite");
    }
    const auto done = static_cast<size_t>(std::max<ssize_t>(count, 0));
    data += done;
    nbytes -= done;
    offset += static_cast<int64_t>(done);
  }
}

void read_all(int file, uint8_t* data, size_t nbytes, int64_t offset) {
  while (nbytes > 0) {
    const ssize_t count = ::pread(file, data, nbytes, offset);
    if (count == 0) {
      fail_with(EIO, "pread beyond the end of the file");
    }
    if (count < 0 && errno != EINTR) {
      fail_with(errno, "pread");
    }
    const auto done = static_cast<size_t>(std::max<ssize_t>(count, 0));
    data += done;
    nbytes -= done;
    offset += static_cast<int64_t>(done);
  }
}

// Asks for what fsync will wait for; that it fails says nothing of the data.
void begin_flush(
    [[maybe_unused]] int file,
    [[maybe_unused]] int64_t begin,
    [[maybe_unused]] int64_t end) {
#ifdef __linux__
  ::sync_file_range(file, begin, end - begin, SYNC_FILE_RANGE_WRITE);
#endif
}

} // namespace

uint32_t write_at(int file, const void* data, size_t nbytes, int64_t offset, uint32_t crc) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  int64_t flushed = offset;
  while (nbytes > 0) {
    const size_t block = std::min(nbytes, kBlockNbytes);
    crc = crc32(crc, bytes, block);
    write_all(file, bytes, block, offset);
    bytes += block;
    nbytes -= block;
    offset += static_cast<int64_t>(block);
    if (offset - flushed >= kFlushNbytes) {
      begin_flush(file, flushed, offset);
      flushed = offset;
    }
  }
  return crc;
}

void reserve([[maybe_unused]] int file, [[maybe_unused]] int64_t nbytes) {
#ifdef __linux__
  // Not posix_fallocate, which writes to each block where the file system cannot.
  while (nbytes > 0 && ::fallocate(file, 0, 0, nbytes) != 0) {
    if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG || errno == EIO) {
      fail_with(errno, "fallocate");
    }
    if (errno != EINTR) {
      return;
    }
  }
#endif
}

uint32_t crc32_at(int file, int64_t offset, size_t nbytes) {
  const auto block = std::make_unique_for_overwrite<uint8_t[]>(std::min(nbytes, kReadNbytes));
  uint32_t crc = 0;
  while (nbytes > 0) {
    const size_t count = std::min(nbytes, kReadNbytes);
    read_all(file, block.get(), count, offset);
    crc = crc32(crc, block.get(), count);
    nbytes -= count;
    offset += static_cast<int64_t>(count);
  }
  return crc;
}

} // namespace zerocore::io
