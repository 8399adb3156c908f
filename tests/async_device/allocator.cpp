// Reuses freed blocks by stream and size, once the streams of record_stream() have done with them.
#include "allocator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "device.h"
#include "queue.h"

namespace async_device {

namespace {

constexpr size_t kAlignment = 512; // as CUDA's allocator
// Allocates several blocks of one size at a time, as CUDA's allocator cuts them from a segment:
// autograd's thread may free a gradient a moment later than it did in the last step.
constexpr int kBlocksPerSegment = 4;

struct Block {
  void* memory = nullptr;
  size_t nbytes = 0;
  int stream = 0;
  std::vector<int> other_streams; // by record_stream()
  std::vector<PointPtr> last_uses; // on these streams, once the block is freed
  bool is_recorded = false; // recorded work may use it at any time
};

class PoisoningAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) {
      return {nullptr, kDevice};
    }
    Block* block = take((nbytes + kAlignment - 1) / kAlignment * kAlignment, current_stream());
    return {block->memory, block, &release, kDevice};
  }

  void record_stream(const c10::DataPtr& data, int stream) {
    if (data.get_deleter() != &release) {
      return;
    }
    const std::lock_guard lock(mutex_);
    auto* block = static_cast<Block*>(data.get_context());
    if (stream != block->stream) {
      block->other_streams.push_back(stream);
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, static_cast<int>(stream.id()));
  }

  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*device*/) override {
    const std::lock_guard lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.num_device_alloc = num_device_allocations_;
    stats.allocated_bytes[0] = allocated_;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex /*device*/) override {
    const std::lock_guard lock(mutex_);
    allocated_.reset_peak();
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // memory alone does not say its stream
  }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }

  void give_back(Block* block) {
    const std::lock_guard lock(mutex_);
    allocated_.decrease(block->nbytes);
    if (block->is_recorded) {
      return;
    }
    for (const int stream : block->other_streams) {
      block->last_uses.push_back(queue(stream).record());
    }
    block->other_streams.clear();
    freed_.push_back(block);
    collect();
  }

 private:
  static void release(void* block);

  Block* take(size_t nbytes, int stream) {
    const std::lock_guard lock(mutex_);
    collect();
    std::vector<Block*>& free = free_[{stream, nbytes}];
    if (free.empty()) {
      ++num_device_allocations_;
      for (int i = 0; i < kBlocksPerSegment; ++i) {
        free.push_back(
            new Block{std::aligned_alloc(kAlignment, nbytes), nbytes, stream, {}, {}, false});
        std::memset(free.back()->memory, kPoison, nbytes);
      }
    }
    Block* block = free.back();
    free.pop_back();
    block->is_recorded = is_recording();
    allocated_.increase(nbytes);
    return block;
  }

  // Gives blocks back to their own stream once other streams have done with them.
  void collect() {
    std::erase_if(freed_, [this](Block* block) {
      std::erase_if(block->last_uses, [](const PointPtr& use) { return use->is_reached(); });
      if (!block->last_uses.empty()) {
        return false;
      }
      queue(block->stream).push([memory = block->memory, nbytes = block->nbytes] {
        std::memset(memory, kPoison, nbytes);
      });
      free_[{block->stream, block->nbytes}].push_back(block);
      return true;
    });
  }

  std::mutex mutex_;
  std::map<std::pair<int, size_t>, std::vector<Block*>> free_; // by stream and size
  std::vector<Block*> freed_; // still in use by other streams
  int64_t num_device_allocations_ = 0;
  c10::CachingAllocator::Stat allocated_; // bytes in use
};

PoisoningAllocator& poisoning_allocator() {
  static auto& instance = *new PoisoningAllocator();
  return instance;
}

void PoisoningAllocator::release(void* block) {
  poisoning_allocator().give_back(static_cast<Block*>(block));
}

} // namespace

c10::DeviceAllocator& allocator() {
  return poisoning_allocator();
}

void record_stream(const c10::DataPtr& data, int stream) {
  poisoning_allocator().record_stream(data, stream);
}

[[maybe_unused]] const bool allocator_is_known = [] {
  c10::SetAllocator(kType, &allocator());
  return true;
}();

} // namespace async_device
