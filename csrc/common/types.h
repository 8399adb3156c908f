// Ids and small value types that every layer shares.
#pragma once

#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>

namespace zerocore {

using UnitId = int32_t;

// Work of one role runs in order; between roles events order it.
enum class StreamRole : uint8_t {
  Compute,
  AllGather,
  ReduceScatter,
  Replicas, // reductions over the ranks that hold the same shard
  DeviceToHost,
  HostToDevice
};
inline constexpr int kNumStreamRoles = 6;

constexpr const char* stream_role_name(StreamRole role) {
  constexpr std::array<const char*, kNumStreamRoles> kNames = {
      "compute", "all_gather", "reduce_scatter", "replicas", "device_to_host", "host_to_device"};
  return kNames[static_cast<size_t>(role)];
}

// The runtime does these, and the planner predicts them.
// AllToAll is an optimizer's, and only run. So are the last four, of states on the host: gradients
// come there, are squared for their norm, weights are updated there, and go back.
enum class TraceOp : uint8_t {
  AllGather,
  GatherNear,
  GatherSums,
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

constexpr const char* trace_op_name(TraceOp op) {
  constexpr std::array<const char*, kNumTraceOps> kNames = {
      "all_gather",
      "gather_near",
      "gather_sums",
      "reduce_scatter",
      "all_reduce",
      "all_to_all",
      "unshard",
      "reshard",
      "to_host",
      "host_squares",
      "host_update",
      "to_device"};
  return kNames[static_cast<size_t>(op)];
}

// Memory for values of a unit, on any device.
enum class Memory : uint8_t {
  Shard, // this rank's parameters, where they have memory of their own
  Main, // what the optimizer updates, where layers compute with something else
  Sent, // main weights as they are sent to the device
  ExpAvg, // the moments of AdamW
  ExpAvgSq,
  Full, // parameters as layers compute with them
  Received, // parameters as they come from the wire
  Near, // this rank's part of Full among the near ranks
  Kept, // this rank's gradients between steps
  FullGrad, // packed gradients of all ranks' shards; unless they are sharded, Kept is a part of it
  Wire, // the same in the type that they travel in
  Scratch, // the result of a reduction, where it is not the gradient yet
  Sums, // sums in order that are not the gradient yet, in its type
  Across, // of Scratch or Sums: what the reduction over the replicas leaves
};
inline constexpr int kNumMemories = 14;

template <typename T>
class ByMemory {
 public:
  T& operator[](Memory memory) {
    return values_[static_cast<size_t>(memory)];
  }
  const T& operator[](Memory memory) const {
    return values_[static_cast<size_t>(memory)];
  }

 private:
  std::array<T, kNumMemories> values_ = {};
};

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

// The text of an error without the stack that torch's errors have.
inline const char* message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error == nullptr ? error.what() : torch_error->what_without_backtrace();
}

} // namespace zerocore
