// Collects hand-overs.
#include "runtime/hand_over.h"

#include <utility>

namespace zerocore {

void HandOverLog::add_record(StreamRole role, int64_t event) {
  entries_.push_back({HandOverKind::Record, role, role, event, 0, 0, {}, {}});
}

void HandOverLog::add_wait(StreamRole role, StreamRole source, int64_t event) {
  entries_.push_back({HandOverKind::Wait, role, source, event, 0, 0, {}, {}});
}

void HandOverLog::add_access(
    StreamRole role,
    bool write,
    const at::Tensor& tensor,
    std::string what,
    std::string unit) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const auto kind = write ? HandOverKind::Write : HandOverKind::Read;
  const uintptr_t end = begin + tensor.nbytes();
  entries_.push_back({kind, role, role, -1, begin, end, std::move(what), std::move(unit)});
}

void HandOverLog::add_allocator(const void* memory, int64_t nbytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const StreamRole role = StreamRole::Compute;
  entries_.push_back(
      {HandOverKind::Write, role, role, -1, begin, begin + nbytes, "other use", "others"});
}

} // namespace zerocore
