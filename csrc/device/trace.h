// A trace of the runtime's operations: counters that are always on, and records on demand.
//
// The counters cost two additions per operation; records cost a branch while they are off. On the
// CPU times are the host's. On a device, events on the streams measure when a collective began and
// ended, and how long the compute stream waited for it. The trace reads them when it stops. The
// host waits for the device only then, and in start() to align the clocks.
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

// Times are nanoseconds of a monotonic clock; -1 = not known.
struct TraceRecord {
  TraceOp op = TraceOp::AllGather;
  UnitId unit = -1; // -1 = an optimizer's
  int64_t nbytes = 0; // of the full bucket; for an all-to-all, of what leaves this rank
  int64_t pool_nbytes = 0; // of the pool in use right after
  int64_t issued_ns = -1; // device: when it began
  int64_t done_ns = -1;
  int64_t wait_ns = 0; // how long the host was blocked on it; device: the compute stream
};

// A record whose times are not read yet. Other threads set begun_at and done_at: gloo's, for each
// part of a collective, and the threads of steps on the host.
struct OpenRecord : TraceRecord {
  void note_begun() {
    begun_at = now_ns();
  }
  // Keeps the latest time of several calls.
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

  // Begins to record. `align` puts a device's times on the host's clock, for which the host waits a
  // few times. Without it only differences of times have a meaning.
  void start(bool align);
  // Ends recording and keeps the records for stop(). Never waits for the device.
  void pause() {
    enabled_ = false;
  }
  // Ends recording and returns the records since start(), in order of issue. On a device the host
  // waits for the last of them.
  std::vector<TraceRecord> stop();

  const OpCounters& counters() const {
    return counters_;
  }

  // Counts an operation and returns its record, or null while recording is off. The record may be
  // completed later, its times also by another thread.
  std::shared_ptr<OpenRecord> add(TraceOp op, UnitId unit, int64_t nbytes, int64_t pool_nbytes);

 private:
  void tie_clocks();
  void read_times(OpenRecord& record) const;

  const Streams& streams_;
  OpCounters counters_ = {};
  bool enabled_ = false;
  StreamEvent origin_; // at origin_ns_ of the host's clock
  int64_t origin_ns_ = 0;
  std::vector<std::shared_ptr<OpenRecord>> records_;
};

} // namespace zerocore
