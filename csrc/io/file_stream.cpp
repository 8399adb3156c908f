// Each thread reads the next block, or sums a block that was read.
#include "io/file_stream.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "common/math.h"
#include "io/crc32.h"
#include "io/system_calls.h"

namespace zerocore::io {

namespace {

constexpr size_t kDirectThreads = 6; // most of them wait for the disk
constexpr int64_t kNumSamples = 64;

int open_to_read(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    fail_with(errno, "cannot open '" + path + "'");
  }
  return file;
}

// Samples the file's pages; returns whether at most half of them are in the page cache.
bool is_mostly_cold(int file, int64_t nbytes) {
  const Mapping mapped(static_cast<size_t>(nbytes), MAP_SHARED, file, 0, PROT_READ);
  if (mapped.data() == nullptr) {
    return false;
  }
  const int64_t num_pages = nbytes / page_nbytes();
  int64_t num_cold = 0;
  for (int64_t i = 0; i < kNumSamples; ++i) {
    char* page = mapped.data() + num_pages * i / kNumSamples * page_nbytes();
    unsigned char is_resident = 1;
    ::mincore(page, 1, &is_resident);
    num_cold += (is_resident & 1U) == 0 ? 1 : 0;
  }
  return num_cold * 2 >= kNumSamples;
}

// See Note [Past the page cache]. StreamWay::Any reads files of few blocks through the cache.
bool choose_direct(int file, int64_t nbytes, StreamWay way) {
  const bool wanted = way == StreamWay::Direct ||
      (way == StreamWay::Any && num_blocks_of(nbytes) > int64_t{kDirectThreads} &&
       is_mostly_cold(file, nbytes));
  return wanted && set_direct(file, true);
}

} // namespace

FileStream::FileStream(
    std::string path,
    int64_t ahead_nbytes,
    size_t num_threads,
    StreamWay way,
    int64_t first_block,
    int64_t end_block)
    : path_(std::move(path)),
      num_threads_(num_threads),
      file_(open_to_read(path_)),
      first_(first_block),
      end_(end_block),
      next_(first_block),
      queue_([this](BlockQueue::Lock& lock) { return work(lock); }) {
  struct stat facts{};
  ::fstat(file_, &facts);
  file_nbytes_ = facts.st_size;
  end_ = std::max(first_, std::min(end_, num_blocks_of(file_nbytes_)));
  sums_.resize(static_cast<size_t>(end_ - first_));
  is_direct_ = choose_direct(file_, file_nbytes_, way);
  if (way == StreamWay::Direct && !is_direct_) {
    fail_with(
        EINVAL, "the file system has no reads past the page cache (O_DIRECT) for '" + path_ + "'");
  }
  num_threads_ = is_direct_ ? kDirectThreads : num_threads_;
  const auto lock = queue_.lock();
  queue_.add_memory(
      std::max(kDirectThreads, num_threads) +
      static_cast<size_t>(num_blocks_of(std::max<int64_t>(ahead_nbytes, 0))));
  queue_.start(is_direct_ ? num_threads_ : 0);
}

std::vector<uint32_t> FileStream::read(std::vector<Run> runs) {
  for (size_t i = 0; i < runs.size(); ++i) {
    const int64_t begin = i == 0 ? first_ * kBlockNbytes : runs[i - 1].offset + runs[i - 1].nbytes;
    if (runs[i].nbytes < 0 || runs[i].offset < begin) {
      throw std::invalid_argument("'" + path_ + "': runs must come in the order of the file");
    }
  }
  const int64_t end = std::min(end_ * kBlockNbytes, file_nbytes_);
  if (!runs.empty() && runs.back().offset + runs.back().nbytes > end) {
    fail_with(EIO, "'" + path_ + "' ends at byte " + std::to_string(end));
  }
  auto lock = queue_.lock();
  if (asked_) {
    throw std::invalid_argument("'" + path_ + "' was read already");
  }
  runs_ = std::move(runs);
  asked_ = true;
  queue_.wake();
  queue_.start(is_direct_ ? 0 : std::max<size_t>(num_threads_, 1) - 1); // this thread works, too
  queue_.finish(lock, [this] { return num_summed_ == sums_.size(); });
  return std::move(sums_);
}

bool FileStream::work(BlockQueue::Lock& lock) {
  if (may_read()) {
    read_next(lock);
  } else if (asked_ && !queue_.waiting.empty()) {
    sum_next(lock);
  } else {
    return false;
  }
  return true;
}

// Keeps the disk busy. Sums blocks from the page cache first, while they are in the processor's
// cache.
bool FileStream::may_read() const {
  if (next_ >= end_ || (!asked_ && !is_direct_)) {
    return false;
  }
  const bool is_busy = num_reads_ + 1 >= num_threads_ || !is_direct_;
  if (asked_ && !queue_.waiting.empty() && is_busy) {
    return false;
  }
  return !queue_.free.empty() || place_of(next_) != nullptr;
}

void FileStream::read_next(BlockQueue::Lock& lock) {
  Block block{next_, place_of(next_), false};
  if (block.data == nullptr) {
    block = {next_, queue_.free.back(), true};
    queue_.free.pop_back();
  }
  ++next_;
  ++num_reads_;
  lock.unlock();
  fill(block);
  lock.lock();
  --num_reads_;
  queue_.waiting.push_back(block);
}

void FileStream::sum_next(BlockQueue::Lock& lock) {
  const Block block = queue_.waiting.front();
  queue_.waiting.pop_front();
  lock.unlock();
  const uint32_t crc = sum(block);
  lock.lock();
  sums_[static_cast<size_t>(block.index - first_)] = crc;
  ++num_summed_;
  if (block.is_own) {
    queue_.free.push_back(block.data);
  }
}

// Returns the destination of a block that lies within one run. Null for other blocks, and for
// direct reads, which need aligned memory.
char* FileStream::place_of(int64_t index) const {
  const int64_t begin = index * kBlockNbytes;
  const size_t at = is_direct_ || !asked_ ? runs_.size() : first_run_behind(begin);
  if (at == runs_.size()) {
    return nullptr;
  }
  const Run& run = runs_[at];
  const bool is_inside = run.offset <= begin && begin + kBlockNbytes <= run.offset + run.nbytes;
  return is_inside ? run.data + (begin - run.offset) : nullptr;
}

void FileStream::fill(const Block& block) const {
  const int64_t begin = block.index * kBlockNbytes;
  const int64_t wanted = std::min(kBlockNbytes, file_nbytes_ - begin);
  const int64_t asked = (wanted + kDiskAlignment - 1) / kDiskAlignment * kDiskAlignment;
  int64_t done = 0;
  while (done < wanted) {
    const auto rest = static_cast<size_t>((block.is_own ? asked : wanted) - done);
    const ssize_t count = ::pread(file_, block.data + done, rest, begin + done);
    if (count == 0) {
      fail_with(EIO, "'" + path_ + "' ends at byte " + std::to_string(begin + done));
    }
    if (count < 0 && errno == EINVAL && is_direct_ && set_direct(file_, false)) {
      continue; // the file system requires another alignment
    }
    if (count < 0 && errno != EINTR) {
      fail_with(errno, "cannot read '" + path_ + "' at byte " + std::to_string(begin + done));
    }
    done += std::max<ssize_t>(count, 0);
  }
}

// Sums a block piece by piece, and copies each piece to its destination while it is in the
// processor's cache.
uint32_t FileStream::sum(const Block& block) const {
  const int64_t begin = block.index * kBlockNbytes;
  const int64_t end = std::min(begin + kBlockNbytes, file_nbytes_);
  uint32_t crc = 0;
  for (int64_t from = begin; from < end; from += kSumNbytes) {
    const int64_t to = std::min(from + kSumNbytes, end);
    crc = crc32(crc, block.data + (from - begin), static_cast<size_t>(to - from));
    if (block.is_own) {
      copy_out(block, from, to);
    }
  }
  return crc;
}

void FileStream::copy_out(const Block& block, int64_t begin, int64_t end) const {
  for (size_t at = first_run_behind(begin); at < runs_.size() && runs_[at].offset < end; ++at) {
    const Run& run = runs_[at];
    const int64_t first = std::max(begin, run.offset);
    const int64_t last = std::min(end, run.offset + run.nbytes);
    if (first < last) {
      const char* from = block.data + (first - block.index * kBlockNbytes);
      std::memcpy(run.data + (first - run.offset), from, static_cast<size_t>(last - first));
    }
  }
}

// Returns the first run that ends after `offset`, or the number of runs.
size_t FileStream::first_run_behind(int64_t offset) const {
  const auto found = std::partition_point(runs_.begin(), runs_.end(), [offset](const Run& run) {
    return run.offset + run.nbytes <= offset;
  });
  return static_cast<size_t>(found - runs_.begin());
}

} // namespace zerocore::io
