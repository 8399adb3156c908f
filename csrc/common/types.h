// Ids and small value types for all folders.
#pragma once

#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>

namespace zerocore {

using UnitId = int32_t;

// Work of one role runs in order; events order work of different roles.
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

// Operations that the runtime counts. The planner predicts all of them but the optimizer's:
// AllToAll, HostSquares, HostUpdate, and ToDevice of updated weights. The last four update states
// on the host: copy gradients, square them, update weights, return these.
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

// The buffers of a unit, on any device.
enum class Memory : uint8_t {
  Shard, // this rank's parameters, if the unit has separate memory for them
  Main, // main weights: the optimizer updates these if layers compute with others
  Sent, // main weights, cast for the copy to the device
  ExpAvg, // AdamW's first moment
  ExpAvgSq,
  Full, // parameters as layers compute with them
  Received, // gathered parameters before they are decoded or copied out
  Near, // this rank's part of Full, from which the near ranks gather
  Kept, // this rank's gradients between steps
  FullGrad, // packed gradients for all ranks' shards; includes Kept unless gradients are sharded
  Wire, // FullGrad in the dtype of the collective
  Scratch, // the result of a reduction before it becomes the gradient
  Sums, // sums in the order of ranks, in the dtype of the gradient, before they become the gradient
  Across, // the part of Scratch or Sums that the reduction over the replicas fills
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

// A half-open range of elements or bytes, [begin, end).
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

// Returns an error's text without the stack trace that torch appends.
inline const char* message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error == nullptr ? error.what() : torch_error->what_without_backtrace();
}

} // namespace zerocore
