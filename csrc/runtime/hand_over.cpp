// Collects hand-overs.
#include "runtime/hand_over.h"

#include <atomic>
#include <utility>

namespace zerocore {

namespace {

std::atomic<int> compute_stream = 0;

// Events of several epochs have numbers of their own.
int64_t event_number(int64_t epoch, int64_t event) {
  return (epoch << 32) + event;
}

} // namespace

void HandOverLog::set_compute_stream(int stream) {
  compute_stream = stream;
}

HandOver& HandOverLog::add(HandOverKind kind, StreamRole role) {
  HandOver& entry = entries_.emplace_back();
  entry.kind = kind;
  entry.role = entry.source = role;
  entry.compute = entry.source_compute = compute_.back();
  return entry;
}

bool HandOverLog::follow_compute_stream() {
  const int now = compute_stream;
  if (now == compute_.back()) {
    return false;
  }
  add(HandOverKind::Record, StreamRole::Compute).event = event_number(epoch(), 0);
  compute_.push_back(now);
  add_wait(StreamRole::Compute, StreamRole::Compute, 0, epoch() - 1);
  return true;
}

void HandOverLog::add_record(StreamRole role, int64_t event) {
  add(HandOverKind::Record, role).event = event_number(epoch(), event);
}

void HandOverLog::add_wait(StreamRole role, StreamRole source, int64_t event, int64_t event_epoch) {
  HandOver& entry = add(HandOverKind::Wait, role);
  entry.source = source;
  entry.source_compute = compute_.at(event_epoch);
  entry.event = event_number(event_epoch, event);
}

void HandOverLog::add_access(
    StreamRole role,
    HandOverKind kind,
    const void* memory,
    size_t nbytes,
    std::string what,
    std::string unit) {
  HandOver& entry = add(kind, role);
  entry.begin = reinterpret_cast<uintptr_t>(memory);
  entry.end = entry.begin + nbytes;
  entry.what = std::move(what);
  entry.unit = std::move(unit);
}

} // namespace zerocore
