// A trace of what the runtime did: counters that are always on, and a list of typed records on
// demand.
//
// The counters cost two additions per operation, the records when off a branch.
// On the CPU times are the host's. On a device with streams they are measured by events on the
// streams: when a collective began and ended there, and how long the compute stream stood still
// for it. They are read when the trace stops, which is the only time that the host waits.
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
  int64_t nbytes = 0; // of the full bucket; of an all-to-all those that leave this rank
  int64_t pool_nbytes = 0; // in use right after
  int64_t issued_ns = -1; // device: when it began
  int64_t done_ns = -1;
  int64_t wait_ns = 0; // the host was blocked on it; device: the compute stream was
};

// A record whose times are not read yet. Other threads than the one that reads them set the times
// in which something ran there: gloo's, for each part of a collective, and those of the host.
struct OpenRecord : TraceRecord {
  void note_begun() {
    begun_at = now_ns();
  }
  // The last one counts.
  void note_done() {
    int64_t before = done_at;
    const int64_t now = now_ns();
    while (before < now && !done_at.compare_exchange_weak(before, now)) {
    }
  }

  StreamEvent begin, end, wait_begin, wait_end; // device only
  std::atomic<int64_t> begun_at = -1, done_at = -1;
};

// How often one operation was done, and the bytes of its buckets, since the engine was made.
struct OpCounter {
  int64_t count = 0;
  int64_t nbytes = 0;
};
using OpCounters = std::array<OpCounter, kNumTraceOps>; // by TraceOp

class Trace {
 public:
  explicit Trace(const Streams& streams) : streams_(streams) {}

  // Begins to record. `align`: a device's times shall be on the host's clock, for which the host
  // waits a few times; without, only their differences mean something.
  void start(bool align);
  // Ends recording and keeps the records for stop(). Never waits for the device.
  void pause() {
    enabled_ = false;
  }
  // Ends recording; the records since start(), in order of issue. On a device it waits for the
  // last of them.
  std::vector<TraceRecord> stop();

  const OpCounters& counters() const {
    return counters_;
  }

  // Counts what happens now and adds a record of it; null when off. The record may be completed
  // later, also from another thread for its times.
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
