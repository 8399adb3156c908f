// Ids and small value types that every layer shares.
#pragma once

#include <cstdint>

namespace zerocore {

using UnitId = int32_t;

// Work of one role runs in order; between roles events order it.
enum class StreamRole : uint8_t { Compute, AllGather, ReduceScatter };
inline constexpr int kNumStreamRoles = 3;

inline const char* stream_role_name(StreamRole role) {
  switch (role) {
    case StreamRole::Compute:
      return "compute";
    case StreamRole::AllGather:
      return "all_gather";
    case StreamRole::ReduceScatter:
      return "reduce_scatter";
  }
  return "";
}

// The runtime does these, and the planner predicts them.
// AllToAll is an optimizer's, and only run.
enum class TraceOp : uint8_t { AllGather, ReduceScatter, AllReduce, AllToAll, Unshard, Reshard };

inline const char* trace_op_name(TraceOp op) {
  switch (op) {
    case TraceOp::AllGather:
      return "all_gather";
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
