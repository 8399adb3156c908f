// Streams by role and events between them; on the CPU both are empty and every call a no-op.
//
// Works on any device through c10's device guard interface, so no CUDA header is needed here.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>

namespace zerocore {

enum class StreamRole : uint8_t { Compute, AllGather, ReduceScatter };

// A point in a stream's work. Copies share the event; a default one is already reached.
using StreamEvent = std::shared_ptr<c10::Event>;

class Streams {
 public:
  explicit Streams(c10::Device device);

  // Marks the end of what the role's stream was given so far.
  StreamEvent record(StreamRole role) const;
  // Later work of the role's stream runs after `event`. The host does not wait.
  void wait(StreamRole role, const StreamEvent& event) const;
  // Makes the role's stream the current one while the guard lives.
  std::optional<c10::StreamGuard> use(StreamRole role) const;

  bool has_streams() const {
    return all_gather_.has_value();
  }
  c10::Device device() const {
    return device_;
  }

 private:
  // Compute is whatever stream is current when asked.
  c10::Stream stream(StreamRole role) const;

  c10::Device device_;
  std::optional<c10::Stream> all_gather_;
  std::optional<c10::Stream> reduce_scatter_;
};

} // namespace zerocore
