// Bytes are summed while they are copied into blocks; complete blocks are the disk's.
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

constexpr size_t kMostUnderWay = 8;
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
  for (int64_t done = 0; done < nbytes;) {
    const auto rest = static_cast<size_t>(nbytes - done);
    const ssize_t count = ::pwrite(file, data + done, rest, offset + done);
    if (count < 0 && errno != EINTR) {
      fail_with(errno, "pwrite");
    }
    done += std::max<ssize_t>(count, 0);
  }
}

// Each piece is written while it is in the cache.
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
  // Not posix_fallocate, which writes to each block where the file system cannot.
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
      sums_(static_cast<size_t>((nbytes + kBlockNbytes - 1) / kBlockNbytes)) {
  if (way == StreamWay::Direct && !is_direct_) {
    fail_with(EINVAL, "no writes past the page cache");
  }
  if (is_direct_) {
    free_ = rings_.emplace_back(static_cast<size_t>(kRingNbytes / kBlockNbytes)).blocks();
    traffic_.emplace(mutex_, kMostUnderWay, [this](int64_t index, const Block& rest, int code) {
      account(index, rest, code);
    });
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
    // Begins what fsync will wait for; an error of it says nothing of the data.
    ::sync_file_range(file_, offset, end - offset, SYNC_FILE_RANGE_WRITE);
  }
  return crc;
}

// The sum of a block is that of its parts, each moved over the bytes behind it, in any order.
void FileWriter::note(int64_t offset, uint32_t crc, int64_t nbytes) {
  const int64_t index = offset / kBlockNbytes;
  const int64_t end = std::min((index + 1) * kBlockNbytes, nbytes_);
  const auto behind = static_cast<uint64_t>(end - offset - nbytes);
  sums_[static_cast<size_t>(index)] ^= crc32_joined(crc, 0, behind);
}

std::vector<uint32_t> FileWriter::sums() const {
  return {sums_.begin(), sums_.end()};
}

char* FileWriter::place_of(int64_t index) {
  std::unique_lock lock(mutex_);
  check();
  const auto is_open = [this, index] { return open_.count(index) != 0; };
  if (!is_open()) {
    char* data = take_block(lock);
    if (is_open()) { // by another thread meanwhile
      free_.push_back(data);
    } else {
      open_[index] = {data, std::min(kBlockNbytes, nbytes_ - index * kBlockNbytes)};
    }
  }
  return open_[index].data;
}

char* FileWriter::take_block(std::unique_lock<std::mutex>& lock) {
  while (free_.empty()) {
    if (traffic_->is_idle()) { // all wait for bytes that may come behind these
      free_ = rings_.emplace_back(1).blocks();
    } else {
      traffic_->wait_for_some(lock);
    }
  }
  char* data = free_.back();
  free_.pop_back();
  return data;
}

// Some bytes of a block are there; the last ones send it.
void FileWriter::add(int64_t index, int64_t nbytes) {
  std::unique_lock lock(mutex_);
  const auto found = open_.find(index);
  found->second.missing -= nbytes;
  if (found->second.missing == 0) {
    char* data = found->second.data;
    open_.erase(found);
    send(lock, index, data);
  }
}

void FileWriter::send(std::unique_lock<std::mutex>& lock, int64_t index, char* data) {
  const int64_t begin = index * kBlockNbytes;
  const int64_t nbytes = std::min(kBlockNbytes, nbytes_ - begin);
  const int64_t whole = nbytes - nbytes % kDiskAlignment;
  rest_.append(data + whole, static_cast<size_t>(nbytes - whole));
  if (whole == 0) {
    free_.push_back(data);
    return;
  }
  while (traffic_->is_full()) {
    traffic_->wait_for_some(lock);
  }
  traffic_->begin(index, {true, file_, data, begin, whole});
}

void FileWriter::account(int64_t index, const Block& rest, int error) {
  if (error == EINVAL && set_direct(file_, false)) { // its alignment is another one
    traffic_->begin(index, rest);
    return;
  }
  if (error != 0 && error_ == 0) {
    error_ = error;
    error_offset_ = rest.offset;
  }
  free_.push_back(rest.data - (rest.offset - index * kBlockNbytes));
}

void FileWriter::check() const {
  if (error_ != 0) {
    fail_with(error_, "cannot write at byte " + std::to_string(error_offset_));
  }
}

void FileWriter::finish() {
  if (!is_direct_) {
    return;
  }
  std::unique_lock lock(mutex_);
  while (!traffic_->is_idle()) {
    traffic_->wait_for_some(lock);
  }
  check();
  if (!open_.empty()) {
    const auto& [index, block] = *open_.begin();
    throw std::invalid_argument(
        std::to_string(block.missing) + " bytes were not given of those from byte " +
        std::to_string(index * kBlockNbytes) + " on");
  }
  set_direct(file_, false);
  const auto rest = static_cast<int64_t>(rest_.size());
  write_all(file_, rest_.data(), rest, nbytes_ - rest);
}

} // namespace zerocore::io
