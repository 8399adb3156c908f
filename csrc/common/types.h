// Ids and small value types that every layer shares.
#pragma once

#include <cstdint>

namespace zerocore {

using UnitId = int32_t;

// Work of one role runs in order; between roles events order it.
enum class StreamRole : uint8_t { Compute, AllGather, ReduceScatter, DeviceToHost, HostToDevice };
inline constexpr int kNumStreamRoles = 5;

inline const char* stream_role_name(StreamRole role) {
  switch (role) {
    case StreamRole::Compute:
      return "compute";
    case StreamRole::AllGather:
      return "all_gather";
    case StreamRole::ReduceScatter:
      return "reduce_scatter";
    case StreamRole::DeviceToHost:
      return "device_to_host";
    case StreamRole::HostToDevice:
      return "host_to_device";
  }
  return "";
}

// The runtime does these, and the planner predicts them.
// AllToAll is an optimizer's, and only run. So are the last four, of states on the host: gradients
// come there, are squared for their norm, weights are updated there, and go back.
enum class TraceOp : uint8_t {
  AllGather,
  GatherNear,
  ReduceScatter,
  AllReduce,
  AllToAll,
  Unshard,
  Reshard,
  ToHost,
  HostSquares,
  HostUpdate,
  ToDevice
};
inline constexpr int kNumTraceOps = static_cast<int>(TraceOp::ToDevice) + 1;

inline const char* trace_op_name(TraceOp op) {
  switch (op) {
    case TraceOp::AllGather:
      return "all_gather";
    case TraceOp::GatherNear:
      return "gather_near";
    case TraceOp::ReduceScatter:
      return "reduce_scatter";
    case TraceOp::AllReduce:
      return "all_reduce";
    case TraceOp::AllToAll:
      return "all_to_all";
    case TraceOp::Unshard:
      return "unshard";
    case TraceOp::Reshard:
      return "reshard";
    case TraceOp::ToHost:
      return "to_host";
    case TraceOp::HostSquares:
      return "host_squares";
    case TraceOp::HostUpdate:
      return "host_update";
    case TraceOp::ToDevice:
      return "to_device";
  }
  return "";
}

// Half-open range of elements, [begin, end).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const {
    return end - begin;
  }
  bool empty() const {
    return end <= begin;
  }
  bool operator==(const Range& other) const = default;
};

} // namespace zerocore
