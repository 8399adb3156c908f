// Collects hand-overs.
#include "runtime/hand_over.h"

#include <utility>

namespace zerocore {

void HandOverLog::add_record(StreamRole role, int64_t event) {
  entries_.push_back({HandOverKind::Record, role, role, event, 0, 0, 0, {}, {}});
}

void HandOverLog::add_wait(StreamRole role, StreamRole source, int64_t event) {
  entries_.push_back({HandOverKind::Wait, role, source, event, 0, 0, 0, {}, {}});
}

void HandOverLog::add_access(
    StreamRole role,
    bool write,
    const at::Tensor& tensor,
    std::string what,
    std::string unit) {
  const auto memory = reinterpret_cast<uintptr_t>(tensor.storage().data());
  const int64_t begin = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
  const auto kind = write ? HandOverKind::Write : HandOverKind::Read;
  const int64_t end = begin + static_cast<int64_t>(tensor.nbytes());
  entries_.push_back({kind, role, role, -1, memory, begin, end, std::move(what), std::move(unit)});
}

void HandOverLog::add_allocation(const void* memory, int64_t nbytes) {
  const auto block = reinterpret_cast<uintptr_t>(memory);
  const StreamRole role = StreamRole::Compute;
  entries_.push_back({HandOverKind::Write, role, role, -1, block, 0, nbytes, "last use", "before"});
}

} // namespace zerocore
