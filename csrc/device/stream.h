// Streams by role and events between them. On the CPU both are empty and every call is a no-op.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/types.h"

namespace zerocore {

// A log of memory accesses and of the events that order them. A checker replays it.
//
// Engines on the CPU write the log; their work runs at once, in the host's order. The log says on
// which stream a device would run the work, and which events would order it. A change of the
// compute stream begins a new epoch.

enum class HandOverKind : uint8_t { Record, Wait, Read, Write };

struct HandOver {
  HandOverKind kind = HandOverKind::Record;
  StreamRole role = StreamRole::Compute;
  StreamRole source = StreamRole::Compute; // Record, Wait: the stream of the event
  int compute = 0, source_compute = 0; // number of the compute stream, for the role Compute
  int64_t event = -1; // Record, Wait: the event's number within its epoch and stream
  uintptr_t begin = 0, end = 0; // Read, Write: the addresses
  std::string what, unit; // Read, Write
};

class HandOverLog {
 public:
  // Makes `stream` the number of this process's compute stream; it is 0 at first. The caller orders
  // the new stream after the old one, and logs that.
  static void set_compute_stream(int stream);
  // Begins a new epoch and returns true if the compute stream has changed.
  bool follow_compute_stream();

  void add_record(StreamRole role, int64_t event);
  // `event_epoch`: the epoch in which the event was recorded.
  void add_wait(StreamRole role, StreamRole source, int64_t event, int64_t event_epoch);
  // Notes that the role's stream reads or writes the memory.
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
  std::vector<int> compute_ = {0}; // the compute stream of each epoch
};

// Streams works on any device through c10's device guards, so it needs no CUDA header.
//
// Note [Redundant waits]
// Every stream has a vector clock: for each stream, the last event that precedes its own work. An
// event carries the clock of its stream, so Streams skips a wait that would order nothing new. This
// saves driver calls. It also lets the checker demand that each remaining wait is needed, so that
// leaving one out is an error.

// By StreamRole: the number of that stream's last event that comes before this point.
using StreamClock = std::array<int64_t, kNumStreamRoles>;

// Returns the role of this name. Throws ValueError for an unknown name.
StreamRole stream_role_named(const std::string& name);

// A point in a stream's work.
struct RecordedEvent {
  std::optional<c10::Event> event; // empty on the CPU
  StreamRole role = StreamRole::Compute;
  StreamClock clock = {};
  int64_t epoch = 0;
};

// Copies share the event. Null: the event was reached.
using StreamEvent = std::shared_ptr<const RecordedEvent>;

// Throws while a CUDA graph is captured; `what` begins the error. A replay would skip zerocore's
// work on the host: waits, control messages, ordered gathers, version counts. The pool's events
// from before the capture would also invalidate it.
void check_not_capturing(c10::Device device, std::string_view what);

class Streams {
 public:
  // With a log all work is synchronous, and the log says what the streams would do.
  explicit Streams(c10::Device device, HandOverLog* log = nullptr);

  // Adds the streams for copies between the device and the host.
  void add_copy_streams();

  // Records an event after the role's work so far.
  StreamEvent record(StreamRole role) const;
  // Records an event with a time for elapsed_ms().
  StreamEvent record_timed(StreamRole role) const;
  // Returns the milliseconds between two timed events that the device has reached.
  static double elapsed_ms(const StreamEvent& begin, const StreamEvent& end);
  // Blocks the host until the event is reached.
  static void synchronize(const StreamEvent& event);
  // Makes later work of the role's stream wait for `event`. The host does not wait.
  void wait(StreamRole role, const StreamEvent& event) const;
  // Makes later work of `role` wait for `behind`'s work so far.
  void order(StreamRole role, StreamRole behind) const {
    if (has_streams() && role != behind) {
      wait(role, record(behind));
    }
  }
  // Returns the current stream; nullopt on the CPU.
  std::optional<c10::Stream> compute_stream() const;
  // Makes later work of `stream` wait for the current stream's work so far, unless they are the
  // same.
  void order_other(const std::optional<c10::Stream>& stream) const;
  // Makes the role's stream the current one while the guard lives.
  std::optional<c10::StreamGuard> use(StreamRole role) const;
  // Returns the device's own handle of the role's stream; null on the CPU.
  void* native_handle(StreamRole role) const;

  // Returns whether work of different roles may run at the same time.
  bool has_streams() const {
    return has_device() || log_ != nullptr;
  }
  // Logs that the role's work, issued now, reads or writes `tensor`, which is contiguous.
  void note_read(
      StreamRole role,
      const at::Tensor& tensor,
      const char* what,
      const std::string& unit) const {
    if (log_ != nullptr) {
      log_access(role, HandOverKind::Read, tensor.const_data_ptr(), tensor.nbytes(), what, unit);
    }
  }
  void note_write(
      StreamRole role,
      const at::Tensor& tensor,
      const char* what,
      const std::string& unit) const {
    if (log_ != nullptr) {
      log_access(role, HandOverKind::Write, tensor.const_data_ptr(), tensor.nbytes(), what, unit);
    }
  }
  // Logs that the device's allocator hands out or takes back memory, which other tensors use on the
  // compute stream.
  void note_allocator(const void* memory, int64_t nbytes) const {
    if (log_ != nullptr) {
      log_access(StreamRole::Compute, HandOverKind::Write, memory, nbytes, "other use", "others");
    }
  }
  c10::Device device() const {
    return device_;
  }

 private:
  bool has_device() const {
    return !device_.is_cpu();
  }
  void take(std::initializer_list<StreamRole> roles, bool is_high_priority);
  // Returns the role's stream; for Compute, the stream that is current now.
  c10::Stream stream(StreamRole role) const;
  StreamEvent make_event(StreamRole role, c10::EventFlag flag) const;
  std::shared_ptr<RecordedEvent> take_unused(c10::EventFlag flag) const;
  void follow_compute_stream() const;
  template <typename... Access>
  void log_access(const Access&... access) const {
    follow_compute_stream();
    log_->add_access(access...);
  }

  // Released events, by whether they are timed: recording one again is faster than creating one.
  // Events may outlive Streams.
  struct Unused {
    std::mutex mutex;
    std::array<std::vector<std::unique_ptr<RecordedEvent>>, 2> events;
  };

  c10::Device device_;
  HandOverLog* log_ = nullptr;
  std::shared_ptr<Unused> unused_ = std::make_shared<Unused>();
  std::array<std::optional<c10::Stream>, kNumStreamRoles> streams_; // by role; none for Compute
  // Clocks belong to one compute stream; a change of that stream begins a new epoch.
  mutable std::array<StreamClock, kNumStreamRoles> clocks_ = {};
  mutable std::optional<c10::Stream> compute_;
  mutable int64_t epoch_ = 0;
};

} // namespace zerocore
