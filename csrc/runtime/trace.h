// A list of typed records of what the runtime did; costs one branch when off.
//
// On the CPU times are the host's. On a device with streams they are measured by events on the
// streams: when a collective began and ended there, and how long the compute stream stood still
// for it. They are read when the trace stops, which is the only time that the host waits.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/types.h"
#include "runtime/stream.h"

namespace zerocore {

// Times are nanoseconds of a monotonic clock; -1 = not known.
struct TraceRecord {
  TraceOp op = TraceOp::AllGather;
  UnitId unit = -1;
  int64_t nbytes = 0; // of the full bucket
  int64_t pool_nbytes = 0; // in use right after
  int64_t issued_ns = -1; // device: when it began
  int64_t done_ns = -1;
  int64_t wait_ns = 0; // the host was blocked on it; device: the compute stream was
  StreamEvent begin, end, wait_begin, wait_end; // device only
};

inline int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

class Trace {
 public:
  explicit Trace(const Streams& streams) : streams_(streams) {}

  bool enabled() const {
    return enabled_;
  }
  void start();
  // The records since start(), in order of issue.
  std::vector<TraceRecord> stop();

  // Adds a record that happens now; null when off. The record may be completed later, also from
  // another thread for its times.
  std::shared_ptr<TraceRecord> add(TraceOp op, UnitId unit, int64_t nbytes, int64_t pool_nbytes);

 private:
  void read_events(TraceRecord& record) const;

  const Streams& streams_;
  bool enabled_ = false;
  StreamEvent origin_; // at origin_ns_ of the host's clock
  int64_t origin_ns_ = 0;
  std::vector<std::shared_ptr<TraceRecord>> records_;
};

} // namespace zerocore
