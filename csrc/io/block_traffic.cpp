// A queue reports parts of blocks; the owner hears of whole ones.
#include "io/block_traffic.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/pages.h"
#include "io/system_calls.h"

namespace zerocore::io {

namespace {

constexpr size_t kNumThreads = 8; // without io_uring

std::unique_ptr<BlockQueue> make_queue(DiskWay way, size_t depth) {
  if (way != DiskWay::Threads) {
    if (auto queue = make_uring_queue(depth)) {
      return queue;
    }
  }
  if (way == DiskWay::IoUring) {
    fail_with(EOPNOTSUPP, "this system has no io_uring, or does not allow it");
  }
  return make_thread_queue(kNumThreads);
}

} // namespace

BlockTraffic::BlockTraffic(DiskWay way, size_t depth, Done done)
    : queue_(make_queue(way, depth)), done_(std::move(done)), blocks_(depth) {
  for (uint32_t id = 0; id < depth; ++id) {
    free_ids_.push_back(id);
  }
}

void BlockTraffic::begin(int64_t tag, Block block) {
  block.id = free_ids_.back();
  queue_->submit(block);
  free_ids_.pop_back();
  blocks_[block.id] = {tag, block};
}

// One thread waits for the queue, without the lock, and does the accounts for all.
void BlockTraffic::wait_for_some(std::unique_lock<std::mutex>& lock) {
  if (waiting_) {
    changed_.wait(lock);
    return;
  }
  std::vector<MovedBlock> moved;
  waiting_ = true;
  lock.unlock();
  try {
    queue_->wait(moved);
  } catch (...) {
    lock.lock();
    waiting_ = false;
    changed_.notify_all();
    throw;
  }
  lock.lock();
  waiting_ = false;
  for (const MovedBlock& block : moved) {
    account(block);
  }
  changed_.notify_all();
}

// A block that was moved in part goes on from there.
void BlockTraffic::account(const MovedBlock& moved) {
  Block& block = blocks_[moved.id].block;
  // ECANCELED: the thread that had submitted it has ended.
  const bool again =
      moved.result == -EINTR || moved.result == -EAGAIN || moved.result == -ECANCELED;
  int64_t done = again ? 0 : std::max<int64_t>(moved.result, 0);
  done -= done < block.nbytes ? done % kDiskAlignment : 0;
  if (again || (done > 0 && done < block.nbytes)) {
    block.data += done;
    block.offset += done;
    block.nbytes -= static_cast<uint32_t>(done);
    queue_->submit(block);
    return;
  }
  const UnderWay ended = blocks_[moved.id];
  free_ids_.push_back(moved.id);
  const int code = moved.result < 0 ? static_cast<int>(-moved.result) : ENODATA; // the file ends
  done_(ended.tag, ended.block, done == 0 ? code : 0);
}

} // namespace zerocore::io
