// A list of typed records of what the runtime did; costs one branch when off.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/types.h"

namespace zerocore {

// Times are nanoseconds of a monotonic clock; -1 = not known.
struct TraceRecord {
  TraceOp op = TraceOp::AllGather;
  UnitId unit = -1;
  int64_t nbytes = 0; // of the full bucket
  int64_t pool_nbytes = 0; // in use right after
  int64_t issued_ns = -1;
  int64_t done_ns = -1;
  int64_t wait_ns = 0; // the host was blocked on it
};

inline int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

class Trace {
 public:
  bool enabled() const {
    return enabled_;
  }
  void start() {
    records_.clear();
    enabled_ = true;
  }
  // The records since start(), in order of issue.
  std::vector<TraceRecord> stop();

  // Adds a record that happens now; null when off. The record may be completed later, also from
  // another thread for its times.
  std::shared_ptr<TraceRecord> add(TraceOp op, UnitId unit, int64_t nbytes, int64_t pool_nbytes);

 private:
  bool enabled_ = false;
  std::vector<std::shared_ptr<TraceRecord>> records_;
};

} // namespace zerocore
