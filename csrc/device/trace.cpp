// Converts the times of a device's events to the host's clock.
#include "device/trace.h"

#include <algorithm>
#include <limits>

namespace zerocore {

void Trace::start(bool align) {
  records_.clear();
  enabled_ = true;
  origin_ = streams_.record_timed(StreamRole::Compute);
  origin_ns_ = now_ns();
  if (align && origin_ != nullptr) {
    tie_clocks();
  }
}

// The host may be interrupted before it reads its clock, so this uses the fastest of several
// readings.
void Trace::tie_clocks() {
  constexpr int kReadings = 5;
  int64_t closest = std::numeric_limits<int64_t>::max();
  for (int reading = 0; reading < kReadings; ++reading) {
    const int64_t begin = now_ns();
    const StreamEvent event = streams_.record_timed(StreamRole::Compute);
    Streams::synchronize(event);
    const int64_t end = now_ns();
    if (end - begin < closest) {
      closest = end - begin;
      origin_ = event;
      origin_ns_ = end;
    }
  }
}

void Trace::read_times(OpenRecord& record) const {
  record.issued_ns = std::max<int64_t>(record.issued_ns, record.begun_at);
  record.done_ns = record.done_at;
  if (record.end == nullptr) {
    return;
  }
  const auto since_origin = [&](const StreamEvent& event) {
    Streams::synchronize(event);
    return origin_ns_ + static_cast<int64_t>(Streams::elapsed_ms(origin_, event) * 1e6);
  };
  record.issued_ns = since_origin(record.begin);
  record.done_ns = since_origin(record.end);
  if (record.wait_end != nullptr) {
    record.wait_ns = since_origin(record.wait_end) - since_origin(record.wait_begin);
  }
}

std::shared_ptr<OpenRecord> Trace::add(
    TraceOp op,
    UnitId unit,
    int64_t nbytes,
    int64_t pool_nbytes) {
  OpCounter& counter = counters_[static_cast<size_t>(op)];
  ++counter.count;
  counter.nbytes += nbytes;
  if (!enabled_) {
    return nullptr;
  }
  auto record = std::make_shared<OpenRecord>();
  record->op = op;
  record->unit = unit;
  record->nbytes = nbytes;
  record->pool_nbytes = pool_nbytes;
  record->issued_ns = now_ns();
  records_.push_back(record);
  return record;
}

std::vector<TraceRecord> Trace::stop() {
  enabled_ = false;
  std::vector<TraceRecord> records;
  records.reserve(records_.size());
  for (const auto& record : records_) {
    read_times(*record);
    records.push_back(*record);
  }
  records_.clear();
  return records;
}

} // namespace zerocore
