// Each thread moves a whole block, however many calls the system wants for it.
#include "io/block_threads.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

#include "common/math.h"

namespace zerocore::io {

namespace {

constexpr size_t kNumThreads = 8;

// Moves the block, or leaves in it the rest that fails; 0 or the errno. A part that the system
// moved counts in units that direct reads and writes are made of.
int move(Block& block) {
  while (true) {
    const auto size = static_cast<size_t>(block.nbytes);
    const ssize_t count = block.writes ? ::pwrite(block.file, block.data, size, block.offset)
                                       : ::pread(block.file, block.data, size, block.offset);
    if (count == block.nbytes) {
      return 0;
    }
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) {
      continue;
    }
    const int64_t done = count < 0 ? 0 : count - count % kDiskAlignment;
    if (done == 0) {
      return count < 0 ? errno : ENODATA; // the file ends
    }
    block.data += done;
    block.offset += done;
    block.nbytes -= done;
  }
}

} // namespace

BlockThreads::BlockThreads(std::mutex& mutex, size_t depth, Done done)
    : mutex_(mutex), depth_(depth), done_(std::move(done)) {
  for (size_t i = 0; i < kNumThreads; ++i) {
    threads_.emplace_back([this] { work(); });
  }
}

BlockThreads::~BlockThreads() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  begun_.notify_all();
}

void BlockThreads::begin(int64_t tag, const Block& block) {
  waiting_.push_back({tag, block});
  ++num_under_way_;
  begun_.notify_one();
}

void BlockThreads::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    begun_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
    if (waiting_.empty()) {
      return;
    }
    Tagged next = waiting_.front();
    waiting_.pop_front();
    lock.unlock();
    const int error = move(next.block);
    lock.lock();
    --num_under_way_;
    done_(next.tag, next.block, error);
    moved_.notify_all();
  }
}

} // namespace zerocore::io
