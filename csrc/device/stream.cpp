// Takes streams from the device's pool, reuses events, and skips waits that order nothing new.
#include "device/stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "device/cuda_calls.h"

namespace zerocore {

namespace {

std::atomic<int> compute_stream = 0;

// Numbers an event uniquely across epochs.
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

namespace {

size_t index(StreamRole role) {
  return static_cast<size_t>(role);
}

// Returns whether the device's current stream is being captured into a CUDA graph.
bool is_capturing(c10::Device device) {
  const auto ask = [](const auto& stream) {
    if constexpr (requires { stream.is_capturing(); }) {
      return stream.is_capturing();
    } else { // before torch 2.13
      return stream.device().is_cuda() && cuda_calls() != nullptr &&
          cuda_calls()->is_capturing(stream);
    }
  };
  return !device.is_cpu() && ask(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

} // namespace

void check_not_capturing(c10::Device device, std::string_view what) {
  TORCH_CHECK(
      !is_capturing(device),
      what,
      " in the capture of a CUDA graph: a replay would skip the work of the host there, as it "
      "gathers, waits, and notes which weights have changed. Capture code that calls no sharded "
      "module, and steps of zerocore.optim.AdamW over plain parameters.");
}

StreamRole stream_role_named(const std::string& name) {
  for (int role = 0; role < kNumStreamRoles; ++role) {
    if (name == stream_role_name(static_cast<StreamRole>(role))) {
      return static_cast<StreamRole>(role);
    }
  }
  TORCH_CHECK_VALUE(false, "no stream is called '", name, "'");
}

Streams::Streams(c10::Device device, HandOverLog* log) : device_(device), log_(log) {
  // Communication has high priority: a collective that starts late delays every layer after it.
  take(
      {StreamRole::AllGather, StreamRole::ReduceScatter, StreamRole::Replicas},
      /*is_high_priority=*/true);
}

void Streams::add_copy_streams() {
  take({StreamRole::DeviceToHost, StreamRole::HostToDevice}, /*is_high_priority=*/false);
}

void Streams::take(std::initializer_list<StreamRole> roles, bool is_high_priority) {
  if (has_device()) {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    for (const StreamRole role : roles) {
      streams_[index(role)] = guard.getStreamFromGlobalPool(device_, is_high_priority);
    }
  }
}

c10::Stream Streams::stream(StreamRole role) const {
  return role == StreamRole::Compute
      ? c10::impl::VirtualGuardImpl(device_.type()).getStream(device_)
      : streams_[index(role)].value();
}

void Streams::follow_compute_stream() const {
  const std::optional<c10::Stream> current = compute_stream();
  const bool changed = has_device() ? std::exchange(compute_, current) != current
                                    : log_ != nullptr && log_->follow_compute_stream();
  if (changed) {
    clocks_ = {};
    ++epoch_;
  }
}

// Reuses released events: recording an event again does not affect the waits already issued.
std::shared_ptr<RecordedEvent> Streams::take_unused(c10::EventFlag flag) const {
  const size_t kind = flag == c10::EventFlag::BACKEND_DEFAULT ? 1 : 0;
  std::unique_ptr<RecordedEvent> event;
  {
    const std::lock_guard lock(unused_->mutex);
    auto& kept = unused_->events[kind];
    if (!kept.empty()) {
      event = std::move(kept.back());
      kept.pop_back();
    }
  }
  if (event == nullptr) {
    event = std::make_unique<RecordedEvent>();
    if (has_device()) {
      event->event.emplace(device_.type(), flag);
    }
  }
  return {event.release(), [unused = unused_, kind](RecordedEvent* dropped) {
            std::unique_ptr<RecordedEvent> owned(dropped);
            const std::lock_guard lock(unused->mutex);
            unused->events[kind].push_back(std::move(owned));
          }};
}

StreamEvent Streams::make_event(StreamRole role, c10::EventFlag flag) const {
  follow_compute_stream();
  auto event = take_unused(flag);
  ++clocks_[index(role)][index(role)];
  event->role = role;
  event->clock = clocks_[index(role)];
  event->epoch = epoch_;
  if (has_device()) {
    event->event->record(stream(role));
  }
  if (log_ != nullptr) {
    log_->add_record(role, event->clock[index(role)]);
  }
  return event;
}

StreamEvent Streams::record(StreamRole role) const {
  return has_streams() ? make_event(role, c10::EventFlag::PYTORCH_DEFAULT) : nullptr;
}

StreamEvent Streams::record_timed(StreamRole role) const {
  return has_device() ? make_event(role, c10::EventFlag::BACKEND_DEFAULT) : nullptr;
}

double Streams::elapsed_ms(const StreamEvent& begin, const StreamEvent& end) {
  return begin->event->elapsedTime(*end->event);
}

void Streams::synchronize(const StreamEvent& event) {
  if (event != nullptr && event->event) {
    event->event->synchronize();
  }
}

void Streams::wait(StreamRole role, const StreamEvent& event) const {
  if (event == nullptr) {
    return;
  }
  follow_compute_stream();
  StreamClock& clock = clocks_[index(role)];
  const size_t source = index(event->role);
  const bool comparable = event->epoch == epoch_;
  if (comparable && clock[source] >= event->clock[source]) {
    return;
  }
  if (event->event) {
    event->event->block(stream(role));
  }
  if (log_ != nullptr) {
    log_->add_wait(role, event->role, event->clock[source], event->epoch);
  }
  for (size_t i = 0; comparable && i < clock.size(); ++i) {
    clock[i] = std::max(clock[i], event->clock[i]);
  }
}

std::optional<c10::Stream> Streams::compute_stream() const {
  return has_device() ? std::optional(stream(StreamRole::Compute)) : std::nullopt;
}

void Streams::order_other(const std::optional<c10::Stream>& other) const {
  const std::optional<c10::Stream> current = compute_stream();
  if (current && other && *current != *other) {
    c10::Event event(device_.type(), c10::EventFlag::PYTORCH_DEFAULT);
    event.record(*current);
    event.block(*other);
  }
}

std::optional<c10::StreamGuard> Streams::use(StreamRole role) const {
  if (!has_device() || role == StreamRole::Compute) {
    return std::nullopt;
  }
  return std::make_optional<c10::StreamGuard>(stream(role));
}

void* Streams::native_handle(StreamRole role) const {
  return has_device() ? stream(role).native_handle() : nullptr;
}

} // namespace zerocore
