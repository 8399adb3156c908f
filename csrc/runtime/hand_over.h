// A log of who touches which memory and what orders it, for a checker to replay.
//
// On the CPU it stands in for streams: everything runs at once in the host's order, while the log
// says on which stream it would have run and which events ordered it. Compute may go from stream to
// stream: an epoch lasts as long as it is on one.
#pragma once

#include <cstddef>
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
  int compute = 0, source_compute = 0; // which compute stream, where the role is Compute
  int64_t event = -1; // Record, Wait: number of the event, counted by epoch and stream
  uintptr_t begin = 0, end = 0; // Read, Write: addresses that are touched
  std::string what, unit; // Read, Write
};

class HandOverLog {
 public:
  // The compute stream of this process is now number `stream`; 0 at first. The caller orders it
  // behind the one before, so the logs say that it is.
  static void set_compute_stream(int stream);
  // Begins another epoch if that is another stream than in the last one; true then.
  bool follow_compute_stream();

  void add_record(StreamRole role, int64_t event);
  // `event_epoch`: in which the event was recorded.
  void add_wait(StreamRole role, StreamRole source, int64_t event, int64_t event_epoch);
  // A stream reads or writes the memory.
  void add_access(
      StreamRole role,
      HandOverKind kind,
      const void* memory,
      size_t nbytes,
      std::string what,
      std::string unit);

  const std::vector<HandOver>& entries() const {
    return entries_;
  }

 private:
  HandOver& add(HandOverKind kind, StreamRole role);
  int64_t epoch() const {
    return static_cast<int64_t>(compute_.size()) - 1;
  }

  std::vector<HandOver> entries_;
  std::vector<int> compute_ = {0}; // by epoch: the compute stream
};

} // namespace zerocore
