// Copies bytes into blocks and sums them; threads write complete blocks to the disk.
#include "io/file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "common/math.h"
#include "io/crc32.h"
#include "io/system_calls.h"

namespace zerocore::io {

namespace {

constexpr size_t kNumThreads = 8;
constexpr int64_t kFlushNbytes = int64_t{8} << 20;

uint32_t copy_and_sum(char* to, const char* from, int64_t nbytes) {
  uint32_t crc = 0;
  for (int64_t at = 0; at < nbytes; at += kSumNbytes) {
    const auto count = static_cast<size_t>(std::min(kSumNbytes, nbytes - at));
    crc = crc32(crc, from + at, count);
    std::memcpy(to + at, from + at, count);
  }
  return crc;
}

void write_all(int file, const char* data, int64_t nbytes, int64_t offset) {
  bool is_refused = false;
  for (int64_t done = 0; done < nbytes;) {
    const auto rest = static_cast<size_t>(nbytes - done);
    const ssize_t count = ::pwrite(file, data + done, rest, offset + done);
    if (count < 0 && errno == EINVAL && !is_refused) { // the file system requires another alignment
      is_refused = true;
      set_direct(file, false);
    } else if (count < 0 && errno != EINTR) {
      fail_with(errno, "cannot write at byte " + std::to_string(offset + done));
    }
    done += std::max<ssize_t>(count, 0);
  }
}

// Writes each piece while it is in the processor's cache.
uint32_t write_and_sum(int file, const char* data, int64_t nbytes, int64_t offset) {
  uint32_t crc = 0;
  for (int64_t at = 0; at < nbytes; at += kSumNbytes) {
    const int64_t count = std::min(kSumNbytes, nbytes - at);
    crc = crc32(crc, data + at, static_cast<size_t>(count));
    write_all(file, data + at, count, offset + at);
  }
  return crc;
}

} // namespace

void reserve(int file, int64_t nbytes) {
  // Not posix_fallocate, which writes to each block if the file system cannot reserve.
  while (nbytes > 0 && ::fallocate(file, 0, 0, nbytes) != 0) {
    if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG || errno == EIO) {
      fail_with(errno, "fallocate");
    }
    if (errno != EINTR) {
      return;
    }
  }
}

FileWriter::FileWriter(int file, int64_t nbytes, StreamWay way)
    : file_(duplicate(file)),
      nbytes_(nbytes),
      is_direct_(
          (way == StreamWay::Direct || (way == StreamWay::Any && nbytes > kRingNbytes)) &&
          set_direct(file, true)),
      sums_(static_cast<size_t>(num_blocks_of(nbytes))),
      queue_([this](BlockQueue::Lock& lock) { return write_next(lock); }) {
  if (way == StreamWay::Direct && !is_direct_) {
    fail_with(EINVAL, "the file system has no writes past the page cache (O_DIRECT)");
  }
  if (is_direct_) {
    const auto lock = queue_.lock();
    queue_.add_memory(static_cast<size_t>(kRingNbytes / kBlockNbytes));
    queue_.start(kNumThreads);
  }
}

uint32_t FileWriter::write(const void* data, size_t nbytes, int64_t offset, uint32_t crc) {
  const auto end = offset + static_cast<int64_t>(nbytes);
  if (offset < 0 || end > nbytes_) {
    throw std::invalid_argument(
        "bytes " + std::to_string(offset) + " to " + std::to_string(end) +
        " are not within a file of " + std::to_string(nbytes_));
  }
  const char* from = static_cast<const char*>(data);
  for (int64_t at = offset; at < end;) {
    const int64_t index = at / kBlockNbytes;
    const int64_t begin = at % kBlockNbytes;
    const int64_t count = std::min(end - at, kBlockNbytes - begin);
    const uint32_t part = is_direct_ ? copy_and_sum(place_of(index) + begin, from, count)
                                     : write_and_sum(file_, from, count, at);
    note(at, part, count);
    crc = crc32_joined(crc, part, static_cast<uint64_t>(count));
    if (is_direct_) {
      add(index, count);
    }
    from += count;
    at += count;
  }
  if (!is_direct_ && end - offset >= kFlushNbytes) {
    // Begins the writes that fsync will wait for; an error here does not concern the data.
    ::sync_file_range(file_, offset, end - offset, SYNC_FILE_RANGE_WRITE);
  }
  return crc;
}

// A block's checksum is the XOR of its parts' checksums, in any order. Each part's checksum is
// first moved over the bytes after the part.
void FileWriter::note(int64_t offset, uint32_t crc, int64_t nbytes) {
  const int64_t index = offset / kBlockNbytes;
  const int64_t end = index * kBlockNbytes + nbytes_of(index);
  const auto behind = static_cast<uint64_t>(end - offset - nbytes);
  sums_[static_cast<size_t>(index)] ^= crc32_joined(crc, 0, behind);
}

std::vector<uint32_t> FileWriter::sums() const {
  return {sums_.begin(), sums_.end()};
}

// Returns the memory of a block. Waits while all memory is on its way to the disk. If incomplete
// blocks hold all of it, takes more.
char* FileWriter::place_of(int64_t index) {
  auto lock = queue_.lock();
  queue_.wait_until(
      lock, [&] { return open_.contains(index) || !queue_.free.empty() || queue_.is_idle(); });
  if (!open_.contains(index)) {
    if (queue_.free.empty()) {
      queue_.add_memory(1);
    }
    open_[index] = {queue_.free.back(), nbytes_of(index)};
    queue_.free.pop_back();
  }
  return open_[index].data;
}

// Counts copied bytes of a block; the last ones hand the block to the threads.
void FileWriter::add(int64_t index, int64_t nbytes) {
  const auto lock = queue_.lock();
  const auto found = open_.find(index);
  found->second.missing -= nbytes;
  if (found->second.missing == 0) {
    char* data = found->second.data;
    const int64_t rest = nbytes_of(index) % kDiskAlignment;
    rest_.append(data + nbytes_of(index) - rest, static_cast<size_t>(rest));
    queue_.waiting.push_back({index, data, true});
    queue_.wake();
    open_.erase(found);
  }
}

bool FileWriter::write_next(BlockQueue::Lock& lock) {
  if (queue_.waiting.empty()) {
    return false;
  }
  const Block block = queue_.waiting.front();
  queue_.waiting.pop_front();
  lock.unlock();
  const int64_t whole = nbytes_of(block.index) / kDiskAlignment * kDiskAlignment;
  write_all(file_, block.data, whole, block.index * kBlockNbytes);
  lock.lock();
  queue_.free.push_back(block.data);
  return true;
}

void FileWriter::finish() {
  if (!is_direct_) {
    return;
  }
  auto lock = queue_.lock();
  queue_.wait_until(lock, [this] { return queue_.is_idle(); });
  if (!open_.empty()) {
    const auto& [index, block] = *open_.begin();
    throw std::invalid_argument(
        std::to_string(block.missing) + " bytes are missing in the block that begins at byte " +
        std::to_string(index * kBlockNbytes));
  }
  set_direct(file_, false);
  const auto rest = static_cast<int64_t>(rest_.size());
  write_all(file_, rest_.data(), rest, nbytes_ - rest);
}

} // namespace zerocore::io
