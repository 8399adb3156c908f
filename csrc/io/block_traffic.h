// Blocks under way for an owner that several threads use: each whole, however the system moves it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "io/block_queue.h"

namespace zerocore::io {

enum class DiskWay : uint8_t { Any, IoUring, Threads }; // Any: io_uring, else threads

// Every call but way() is made under the owner's lock.
class BlockTraffic {
 public:
  // Takes the owner's tag of a block, and 0 or the errno of the rest of it that failed.
  using Done = std::function<void(int64_t tag, const Block& rest, int error)>;

  // Throws EOPNOTSUPP for DiskWay::IoUring where the system has none.
  BlockTraffic(DiskWay way, size_t depth, Done done);
  ~BlockTraffic() = default; // idle
  BlockTraffic(const BlockTraffic&) = delete;
  BlockTraffic& operator=(const BlockTraffic&) = delete;

  bool is_full() const {
    return free_ids_.empty();
  }
  bool is_idle() const {
    return free_ids_.size() == blocks_.size();
  }
  // Does not wait. Not full; the block's id is given here.
  void begin(int64_t tag, Block block);
  // Lets the lock go until a block is done that was under way; `done` is called under the lock, by
  // whichever thread waits. Not idle.
  void wait_for_some(std::unique_lock<std::mutex>& lock);

  const char* way() const {
    return queue_->name();
  }

 private:
  struct UnderWay {
    int64_t tag = 0;
    Block block;
  };

  void account(const MovedBlock& moved);

  std::unique_ptr<BlockQueue> queue_;
  Done done_;
  std::vector<UnderWay> blocks_; // by the block's id
  std::vector<uint32_t> free_ids_;
  std::condition_variable changed_;
  bool waiting_ = false; // some thread waits for the queue
};

} // namespace zerocore::io
