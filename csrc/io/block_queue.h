// Transfers of blocks between memory and open files, many at a time: by io_uring or by threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace zerocore::io {

// `id` is the caller's, and no other block under way has it.
struct Block {
  uint32_t id = 0;
  bool writes = false;
  int file = -1;
  char* data = nullptr;
  int64_t offset = 0;
  uint32_t nbytes = 0;
};

// Bytes that were moved, maybe fewer than were asked for, or an errno with a minus.
struct MovedBlock {
  uint32_t id = 0;
  int64_t result = 0;
};

// submit() by one thread at a time, wait() by one at a time; the two may run beside each other.
// Every block is moved and waited for before the queue is destroyed.
class BlockQueue {
 public:
  virtual ~BlockQueue() = default;
  virtual const char* name() const = 0;
  // Does not wait for the block. At most as many are under way as the queue was made for.
  virtual void submit(const Block& block) = 0;
  // Waits until something is moved that no wait() has returned, and appends it. Some block is
  // under way.
  virtual void wait(std::vector<MovedBlock>& moved) = 0;
};

// Null where the system has no io_uring with plain reads and writes (Linux 5.6), or does not allow
// it, as containers may. No buffers are registered: that would count against RLIMIT_MEMLOCK.
std::unique_ptr<BlockQueue> make_uring_queue(size_t depth);

// pread and pwrite by so many threads.
std::unique_ptr<BlockQueue> make_thread_queue(size_t num_threads);

} // namespace zerocore::io
