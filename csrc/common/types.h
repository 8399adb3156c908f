// Ids and small value types that all folders share.
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

// Operations that the runtime counts. The planner predicts all but an optimizer's: AllToAll,
// HostSquares, HostUpdate, and ToDevice of updated weights. The last four are of states on the
// host: gradients go there, are squared for their norm, weights are updated, and go back.
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
  Shard, // this rank's parameters, if they have memory of their own
  Main, // main weights, which the optimizer updates if layers compute with other values
  Sent, // main weights, cast for the copy to the device
  ExpAvg, // AdamW's moments: this one and the next
  ExpAvgSq,
  Full, // parameters as layers compute with them
  Received, // gathered parameters that are yet to be decoded or copied out
  Near, // this rank's part of Full, from which the near ranks gather
  Kept, // this rank's gradients between steps
  FullGrad, // packed gradients for all ranks' shards; includes Kept unless gradients are sharded
  Wire, // FullGrad in the dtype that travels
  Scratch, // the result of a reduction that is not the gradient yet
  Sums, // sums in the order of ranks that are not the gradient yet, in its dtype
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

// Returns an error's text without the stack trace that torch adds.
inline const char* message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error == nullptr ? error.what() : torch_error->what_without_backtrace();
}

} // namespace zerocore
