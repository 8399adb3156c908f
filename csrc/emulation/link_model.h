// How long a collective takes on a link, by formula.
#pragma once

#include <cstdint>
#include <limits>

namespace zerocore {

// A link between the ranks of a group.
struct LinkModel {
  double bandwidth = std::numeric_limits<double>::infinity(); // bytes per second and direction
  double latency = 0.0; // seconds per call
  int sms = 0; // multiprocessors that a collective occupies on a GPU; 0 = a corner of one

  // Throws ValueError on a bandwidth or latency that no link has.
  void validate() const;
};

enum class Traffic : uint8_t {
  AllGather,
  ReduceScatter,
  AllReduce,
  AllToAll,
  Gather,
  Scatter,
  Broadcast,
  Reduce,
  Barrier,
};

// Time in which the bytes of one collective cross the link, without latency.
double transfer_ns(const LinkModel& link, Traffic traffic, int64_t nbytes, int64_t world_size);

// latency + transfer, to the nanosecond. Calls that are coalesced pay the latency once.
int64_t duration_ns(const LinkModel& link, double transfer_ns);

} // namespace zerocore
