// Blocks by io_uring, through its system calls.
//
// Note [Two rings]
// The kernel and this process share two rings of entries. We write an entry of what is to be done
// behind the tail of the first and move that tail; the kernel writes an entry of what is done
// behind the tail of the second, and we move its head once we have read it. Each index has one
// writer, whose stores the other side sees in order: release by the writer, acquire by the reader.
#include "io/block_queue.h"

#if __has_include(<linux/io_uring.h>)

#include <linux/io_uring.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "io/system_calls.h"

namespace zerocore::io {

namespace {

int uring_setup(unsigned entries, io_uring_params& params) {
  return static_cast<int>(::syscall(__NR_io_uring_setup, entries, &params));
}

int uring_enter(int ring, unsigned submitted, unsigned awaited) {
  const unsigned flags = awaited > 0 ? IORING_ENTER_GETEVENTS : 0;
  return static_cast<int>(
      ::syscall(__NR_io_uring_enter, ring, submitted, awaited, flags, nullptr, 0));
}

// Whether the kernel knows reads and writes without vectors.
bool has_operations(int ring) {
  constexpr unsigned kNumOps = IORING_OP_WRITE + 1;
  // The operations follow the head in memory.
  alignas(io_uring_probe)
      std::array<char, sizeof(io_uring_probe) + kNumOps * sizeof(io_uring_probe_op)>
          bytes{};
  auto* probe = reinterpret_cast<io_uring_probe*>(bytes.data());
  if (::syscall(__NR_io_uring_register, ring, IORING_REGISTER_PROBE, probe, kNumOps) != 0) {
    return false;
  }
  const auto supports = [&](unsigned op) {
    return op <= probe->last_op && (probe->ops[op].flags & IO_URING_OP_SUPPORTED) != 0;
  };
  return supports(IORING_OP_READ) && supports(IORING_OP_WRITE);
}

// A number in memory that is shared with the kernel.
unsigned& word(const Mapping& memory, unsigned offset) {
  return *reinterpret_cast<unsigned*>(memory.data() + offset);
}

unsigned load(unsigned& shared) {
  return std::atomic_ref(shared).load(std::memory_order_acquire);
}

void store(unsigned& shared, unsigned value) {
  std::atomic_ref(shared).store(value, std::memory_order_release);
}

// See Note [Two rings].
class UringQueue final : public BlockQueue {
 public:
  explicit UringQueue(size_t depth)
      : ring_(uring_setup(static_cast<unsigned>(depth), params_)),
        to_do_(
            params_.sq_off.array + params_.sq_entries * sizeof(unsigned),
            MAP_SHARED,
            ring_,
            IORING_OFF_SQ_RING),
        done_(
            params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe),
            MAP_SHARED,
            ring_,
            IORING_OFF_CQ_RING),
        entries_(params_.sq_entries * sizeof(io_uring_sqe), MAP_SHARED, ring_, IORING_OFF_SQES) {}

  bool is_usable() const {
    return ring_ >= 0 && has_operations(ring_) && to_do_.data() != nullptr &&
        done_.data() != nullptr && entries_.data() != nullptr;
  }

  const char* name() const override {
    return "io_uring";
  }

  void submit(const Block& block) override {
    const unsigned tail = word(to_do_, params_.sq_off.tail); // only we write it
    const unsigned index = tail & word(to_do_, params_.sq_off.ring_mask);
    io_uring_sqe entry{};
    entry.opcode = block.writes ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = block.file;
    entry.addr = reinterpret_cast<uint64_t>(block.data);
    entry.len = block.nbytes;
    entry.off = static_cast<uint64_t>(block.offset);
    entry.user_data = block.id;
    std::memcpy(entries_.data() + index * sizeof(entry), &entry, sizeof(entry));
    (&word(to_do_, params_.sq_off.array))[index] = index;
    store(word(to_do_, params_.sq_off.tail), tail + 1);
    while (uring_enter(ring_, 1, 0) < 0) {
      if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
        fail_with(errno, "io_uring_enter");
      }
      ::sched_yield(); // the kernel is short of memory for requests
    }
  }

  void wait(std::vector<MovedBlock>& moved) override {
    while (!take(moved)) {
      if (uring_enter(ring_, 0, 1) < 0 && errno != EINTR && errno != EAGAIN) {
        fail_with(errno, "io_uring_enter");
      }
    }
  }

 private:
  // Takes the blocks that are done by now; false for none.
  bool take(std::vector<MovedBlock>& moved) {
    const unsigned begin = word(done_, params_.cq_off.head); // only we write it
    const unsigned end = load(word(done_, params_.cq_off.tail));
    const unsigned mask = word(done_, params_.cq_off.ring_mask);
    const auto* entries = reinterpret_cast<io_uring_cqe*>(done_.data() + params_.cq_off.cqes);
    for (unsigned i = begin; i != end; ++i) {
      const io_uring_cqe& entry = entries[i & mask];
      moved.push_back({static_cast<uint32_t>(entry.user_data), entry.res});
    }
    store(word(done_, params_.cq_off.head), end);
    return begin != end;
  }

  io_uring_params params_{};
  Descriptor ring_;
  Mapping to_do_, done_, entries_;
};

} // namespace

std::unique_ptr<BlockQueue> make_uring_queue(size_t depth) {
  auto queue = std::make_unique<UringQueue>(depth);
  return queue->is_usable() ? std::move(queue) : nullptr;
}

} // namespace zerocore::io

#else

namespace zerocore::io {

std::unique_ptr<BlockQueue> make_uring_queue(size_t /*depth*/) {
  return nullptr;
}

} // namespace zerocore::io

#endif
