// Streams by role over c10's device guard interface.
#include "runtime/stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace zerocore {

Streams::Streams(c10::Device device) : device_(device) {
  if (device.type() != c10::DeviceType::CPU) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    // Communication first: a collective that starts late delays every layer behind it.
    all_gather_ = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    reduce_scatter_ = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
}

c10::Stream Streams::stream(StreamRole role) const {
  switch (role) {
    case StreamRole::AllGather:
      return *all_gather_;
    case StreamRole::ReduceScatter:
      return *reduce_scatter_;
    case StreamRole::Compute:
      break;
  }
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

StreamEvent Streams::record(StreamRole role) const {
  if (!has_streams()) {
    return nullptr;
  }
  auto event = std::make_shared<c10::Event>(device_.type());
  event->record(stream(role));
  return event;
}

void Streams::wait(StreamRole role, const StreamEvent& event) const {
  if (event != nullptr) {
    event->block(stream(role));
  }
}

std::optional<c10::StreamGuard> Streams::use(StreamRole role) const {
  if (!has_streams() || role == StreamRole::Compute) {
    return std::nullopt;
  }
  return std::make_optional<c10::StreamGuard>(stream(role));
}

} // namespace zerocore
