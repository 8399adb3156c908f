// A trace of the runtime's operations: counters that are always on, and records on demand.
//
// The counters cost two additions per operation; records cost one branch while they are off. On the
// CPU times are the host's. On a device, events on the streams measure when a collective began and
// ended, and how long the compute stream waited for it. stop() reads these times. The host waits
// for the device only there, and in start() to align the clocks.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/types.h"
#include "device/stream.h"

namespace zerocore {

inline int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

// Times are nanoseconds of a monotonic clock; -1: unknown.
struct TraceRecord {
  TraceOp op = TraceOp::AllGather;
  UnitId unit = -1; // -1: an optimizer's operation
  int64_t nbytes = 0; // bytes of the full bucket; for an all-to-all, the bytes that this rank sends
  int64_t pool_nbytes = 0; // bytes of the pool in use right after the operation
  int64_t issued_ns = -1; // host: time of issue; device: time of its begin
  int64_t done_ns = -1;
  int64_t wait_ns = 0; // how long the host, or on a device the compute stream, waited for it
};

// A record whose times are still open. Other threads set begun_at and done_at: gloo's, for each
// part of a collective, and the threads of host updates.
struct OpenRecord : TraceRecord {
  void note_begun() {
    begun_at = now_ns();
  }
  // Stores the latest time of several calls.
  void note_done() {
    int64_t before = done_at;
    const int64_t now = now_ns();
    while (before < now && !done_at.compare_exchange_weak(before, now)) {
    }
  }

  StreamEvent begin, end, wait_begin, wait_end; // device only
  std::atomic<int64_t> begun_at = -1, done_at = -1;
};

// How often an operation ran since the engine was made, and the bytes of its buckets.
struct OpCounter {
  int64_t count = 0;
  int64_t nbytes = 0;
};
using OpCounters = std::array<OpCounter, kNumTraceOps>; // by TraceOp

class Trace {
 public:
  explicit Trace(const Streams& streams) : streams_(streams) {}

  // Starts recording. `align` puts a device's times on the host's clock, for which the host waits a
  // few times. Without it only differences of times are valid.
  void start(bool align);
  // Stops recording; the records remain for stop(). Never waits for the device.
  void pause() {
    enabled_ = false;
  }
  // Stops recording and returns the records since start(), in order of issue. On a device the host
  // waits for the last of them.
  std::vector<TraceRecord> stop();

  const OpCounters& counters() const {
    return counters_;
  }

  // Counts an operation and returns its record, or null while recording is off. Any thread may set
  // the record's times later.
  std::shared_ptr<OpenRecord> add(TraceOp op, UnitId unit, int64_t nbytes, int64_t pool_nbytes);

 private:
  void tie_clocks();
  void read_times(OpenRecord& record) const;

  const Streams& streams_;
  OpCounters counters_ = {};
  bool enabled_ = false;
  StreamEvent origin_; // an event at origin_ns_ of the host's clock
  int64_t origin_ns_ = 0;
  std::vector<std::shared_ptr<OpenRecord>> records_;
};

} // namespace zerocore
