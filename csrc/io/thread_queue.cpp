// Blocks by threads that call pread and pwrite, where there is no io_uring.
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "io/block_queue.h"

namespace zerocore::io {

namespace {

int64_t move_by_call(const Block& block) {
  const ssize_t count = block.writes ? ::pwrite(block.file, block.data, block.nbytes, block.offset)
                                     : ::pread(block.file, block.data, block.nbytes, block.offset);
  return count < 0 ? -errno : count;
}

class ThreadQueue final : public BlockQueue {
 public:
  explicit ThreadQueue(size_t num_threads) {
    for (size_t i = 0; i < num_threads; ++i) {
      threads_.emplace_back([this] { run(); });
    }
  }
  ~ThreadQueue() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    submitted_.notify_all();
  }
  ThreadQueue(const ThreadQueue&) = delete;
  ThreadQueue& operator=(const ThreadQueue&) = delete;

  const char* name() const override {
    return "threads";
  }

  void submit(const Block& block) override {
    const std::lock_guard lock(mutex_);
    blocks_.push_back(block);
    submitted_.notify_one();
  }

  void wait(std::vector<MovedBlock>& moved) override {
    std::unique_lock lock(mutex_);
    moved_any_.wait(lock, [this] { return !moved_.empty(); });
    moved.insert(moved.end(), moved_.begin(), moved_.end());
    moved_.clear();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      submitted_.wait(lock, [this] { return stopping_ || !blocks_.empty(); });
      if (blocks_.empty()) {
        return;
      }
      const Block block = blocks_.front();
      blocks_.pop_front();
      lock.unlock();
      const int64_t result = move_by_call(block);
      lock.lock();
      moved_.push_back({block.id, result});
      moved_any_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable submitted_;
  std::condition_variable moved_any_;
  std::deque<Block> blocks_;
  std::vector<MovedBlock> moved_;
  bool stopping_ = false;
  std::vector<std::jthread> threads_; // last: they use what is above, and are joined first
};

} // namespace

std::unique_ptr<BlockQueue> make_thread_queue(size_t num_threads) {
  return std::make_unique<ThreadQueue>(num_threads);
}

} // namespace zerocore::io
