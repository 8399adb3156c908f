// A log of who touches which memory and what orders it, for a checker to replay.
//
// On the CPU it stands in for streams: everything runs at once in the host's order, while the log
// says on which stream it would have run and which events ordered it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/types.h"

namespace zerocore {

enum class HandOverKind : uint8_t { Record, Wait, Read, Write };

struct HandOver {
  HandOverKind kind = HandOverKind::Record;
  StreamRole role = StreamRole::Compute;
  StreamRole source = StreamRole::Compute; // Record, Wait: the stream of the event
  int64_t event = -1; // Record, Wait: number of the event, counted by stream
  uintptr_t begin = 0, end = 0; // Read, Write: addresses that are touched
  std::string what, unit; // Read, Write
};

class HandOverLog {
 public:
  void add_record(StreamRole role, int64_t event);
  void add_wait(StreamRole role, StreamRole source, int64_t event);
  // A stream reads or writes `tensor`, which is contiguous.
  void add_access(
      StreamRole role,
      bool write,
      const at::Tensor& tensor,
      std::string what,
      std::string unit);

  // The device's allocator gives or takes back a block, whose other users are on the compute
  // stream.
  void add_allocator(const void* memory, int64_t nbytes);

  const std::vector<HandOver>& entries() const {
    return entries_;
  }

 private:
  std::vector<HandOver> entries_;
};

} // namespace zerocore
