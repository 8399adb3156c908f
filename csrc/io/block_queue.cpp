// Runs the queue's threads, and maps the memory of blocks.
#include "io/block_queue.h"

#include <cerrno>
#include <string>

namespace zerocore::io {

BlockQueue::~BlockQueue() {
  Lock lock(mutex_);
  try {
    finish(lock, [] { return true; });
  } catch (...) {
    // no caller is left to get the error
  }
}

void BlockQueue::start(size_t num_threads) {
  for (size_t i = 0; i < num_threads; ++i) {
    threads_.emplace_back([this] {
      Lock lock(mutex_);
      work_until(lock, [] { return false; });
    });
  }
}

// Maps one extra block, so that the first one can begin on a multiple of the block size.
void BlockQueue::add_memory(size_t num_blocks) {
  const size_t nbytes = (num_blocks + 1) * kBlockNbytes;
  char* data = memory_.emplace_back(nbytes).data();
  if (data == nullptr) {
    fail_with(errno, "cannot map memory for " + std::to_string(num_blocks) + " blocks of a file");
  }
  ::madvise(data, nbytes, MADV_HUGEPAGE);
  data += kBlockNbytes - reinterpret_cast<uintptr_t>(data) % kBlockNbytes;
  for (size_t i = num_blocks; i > 0; --i) {
    free.push_back(data + (i - 1) * kBlockNbytes);
  }
}

void BlockQueue::wait_until(Lock& lock, const std::function<bool()>& is_so) {
  changed_.wait(lock, [&] { return error_ != nullptr || is_so(); });
  if (error_ != nullptr) {
    std::rethrow_exception(error_);
  }
}

void BlockQueue::finish(Lock& lock, const std::function<bool()>& is_so) {
  work_until(lock, is_so);
  stopping_ = true;
  changed_.notify_all();
  lock.unlock();
  for (std::thread& thread : threads_) {
    thread.join();
  }
  lock.lock();
  threads_.clear();
  wait_until(lock, [] { return true; });
}

void BlockQueue::work_until(Lock& lock, const std::function<bool()>& is_so) {
  while (!stopping_ && error_ == nullptr && !is_so()) {
    ++num_working_;
    bool has_worked = true;
    try {
      has_worked = work_(lock);
    } catch (...) {
      if (!lock.owns_lock()) {
        lock.lock();
      }
      error_ = error_ == nullptr ? std::current_exception() : error_;
    }
    --num_working_;
    if (has_worked) {
      changed_.notify_all();
    } else {
      changed_.wait(lock);
    }
  }
}

} // namespace zerocore::io
