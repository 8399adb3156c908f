// The duration formula of the emulated link.
#include "emulation/link_model.h"

#include <c10/util/Exception.h>

#include <cmath>

namespace zerocore {

void LinkModel::validate() const {
  TORCH_CHECK_VALUE(
      bandwidth > 0.0, "bandwidth must be positive bytes per second, got ", bandwidth);
  TORCH_CHECK_VALUE(
      latency >= 0.0 && std::isfinite(latency),
      "latency must be finite seconds, 0 or more, got ",
      latency);
  TORCH_CHECK_VALUE(sms >= 0, "sms must be 0 or more, got ", sms);
}

namespace {

// Bytes that the busiest direction of a rank's link carries, over the collective's bytes (of the
// full tensor: all slices). These are the factors between "algorithm" and "bus" bandwidth in
// PERFORMANCE.md of NVIDIA's nccl-tests: (N-1)/N, twice that for an all-reduce (a reduce-scatter
// and an all-gather), 1 for broadcast and reduce. All are 0 in a world of one rank.
double traffic_factor(Traffic traffic, int64_t world_size) {
  if (world_size == 1) {
    return 0.0;
  }
  const auto n = static_cast<double>(world_size);
  switch (traffic) {
    case Traffic::AllReduce:
      return 2.0 * (n - 1.0) / n;
    case Traffic::Broadcast:
    case Traffic::Reduce:
      return 1.0;
    case Traffic::Barrier:
      return 0.0;
    default:
      return (n - 1.0) / n;
  }
}

} // namespace

double transfer_ns(const LinkModel& link, Traffic traffic, int64_t nbytes, int64_t world_size) {
  return static_cast<double>(nbytes) * traffic_factor(traffic, world_size) / link.bandwidth * 1e9;
}

int64_t duration_ns(const LinkModel& link, double transfer_ns) {
  return std::llround(link.latency * 1e9 + transfer_ns);
}

} // namespace zerocore
