// Streams by role and events between them; on the CPU both are empty and every call a no-op.
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

// A log of who touches which memory and what orders it, for a checker to replay.
//
// On the CPU it stands in for streams: everything runs at once in the host's order, while the log
// says on which stream it would have run and which events ordered it. Compute may go from stream to
// stream: an epoch lasts as long as it is on one.

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

// Works on any device through c10's device guard interface, so no CUDA header is needed here.
//
// Note [Waits that are needed]
// Every stream keeps a vector clock: the last work of each stream that its own work runs behind.
// An event carries the clock of the stream it was recorded on, so a wait that would order nothing
// new is left out. It saves calls to the driver, and it lets the checker demand that every wait
// that remains is one without which something would break.

// By StreamRole: how many events of that stream lie behind.
using StreamClock = std::array<int64_t, kNumStreamRoles>;

// Throws ValueError for what is no name of a role.
StreamRole stream_role_named(const std::string& name);

// A point in a stream's work.
struct RecordedEvent {
  std::optional<c10::Event> event; // none on a recording device
  StreamRole role = StreamRole::Compute;
  StreamClock clock = {};
  int64_t epoch = 0;
};

// Copies share the event; a default one is already reached.
using StreamEvent = std::shared_ptr<const RecordedEvent>;

// Throws in a capture; `what` was called. A replay would leave out zerocore's work on the host:
// waits, the exchange of control messages, gathers in the ranks' order, notes of what has changed.
// And an event of before the capture, as the pool has them, would make it invalid.
void check_not_capturing(c10::Device device, std::string_view what);

class Streams {
 public:
  // With a log nothing is asynchronous, and the log says what the streams would have done.
  explicit Streams(c10::Device device, HandOverLog* log = nullptr);

  // From now on there are streams for copies between the device and the host.
  void add_copy_streams();

  // Marks the end of what the role's stream was given so far.
  StreamEvent record(StreamRole role) const;
  // As record, with a time that elapsed_ms() can read.
  StreamEvent record_timed(StreamRole role) const;
  // Milliseconds between two timed events that were reached.
  static double elapsed_ms(const StreamEvent& begin, const StreamEvent& end);
  // Blocks the host until an event is reached.
  static void synchronize(const StreamEvent& event);
  // Later work of the role's stream runs after `event`. The host does not wait.
  void wait(StreamRole role, const StreamEvent& event) const;
  // Later work of `role` runs after what `behind` was given so far.
  void order(StreamRole role, StreamRole behind) const {
    if (has_streams() && role != behind) {
      wait(role, record(behind));
    }
  }
  // The stream that is current now; none on the CPU.
  std::optional<c10::Stream> compute_stream() const;
  // Later work of `stream` runs after what the compute stream was given so far, if it is another.
  void order_other(const std::optional<c10::Stream>& stream) const;
  // Makes the role's stream the current one while the guard lives.
  std::optional<c10::StreamGuard> use(StreamRole role) const;
  // The device's own handle of the role's stream; null without streams.
  void* native_handle(StreamRole role) const;

  // Work on different roles may run at the same time.
  bool has_streams() const {
    return has_device() || log_ != nullptr;
  }
  // Says that work of the role's stream, given now, reads or writes `tensor` (contiguous).
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
  // The device's allocator gives or takes back memory; its other users are on the compute stream.
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
  // Compute is whatever stream is current when asked.
  c10::Stream stream(StreamRole role) const;
  StreamEvent make_event(StreamRole role, c10::EventFlag flag) const;
  std::shared_ptr<RecordedEvent> take_unused(c10::EventFlag flag) const;
  void follow_compute_stream() const;
  template <typename... Access>
  void log_access(const Access&... access) const {
    follow_compute_stream();
    log_->add_access(access...);
  }

  // Those that nobody holds any more, by whether they are timed: a new event of the driver takes
  // longer than recording one again. Events may outlive the streams.
  struct Unused {
    std::mutex mutex;
    std::array<std::vector<std::unique_ptr<RecordedEvent>>, 2> events;
  };

  c10::Device device_;
  HandOverLog* log_ = nullptr;
  std::shared_ptr<Unused> unused_ = std::make_shared<Unused>();
  std::array<std::optional<c10::Stream>, kNumStreamRoles> streams_; // by role; none of Compute
  // Clocks hold for one compute stream; another one begins a new epoch.
  mutable std::array<StreamClock, kNumStreamRoles> clocks_ = {};
  mutable std::optional<c10::Stream> compute_;
  mutable int64_t epoch_ = 0;
};

} // namespace zerocore
