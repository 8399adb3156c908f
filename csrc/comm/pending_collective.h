// A collective, from before its issue until the wait for it. It keeps its tensors alive, and
// reports to the group's watch, the trace and the log of hand-overs.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/stream.h"
#include "device/trace.h"
#include "watch/issue_watch.h"

namespace zerocore {

// A null entry: the current stream runs the work.
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// A program's own collective, called instead of the backend's. It may return null if the collective
// is done or the current stream runs it.
using OwnCollective =
    std::function<c10::intrusive_ptr<c10d::Work>(const at::Tensor& to, const at::Tensor& from)>;

// Names a collective in errors and in the trace; `unit` must outlive the collective.
struct CollectiveTag {
  const std::string* unit = nullptr;
  std::shared_ptr<OpenRecord> record; // null while nothing is traced
  UnitId id = -1; // the unit's id; -1 for several units
  // Bytes that ranks compare, equal on all of them; by default the bytes of `to`.
  std::optional<int64_t> nbytes = std::nullopt;
  const OwnCollective* own = nullptr; // null for the backend's; not empty; outlives the call
};

class PendingCollective {
 public:
  PendingCollective() = default;
  // Announces a collective on the role's stream, see IssueWatch::begin. It writes `to` and reads
  // `from`, which is undefined for a collective in place.
  PendingCollective(
      IssueWatch& watch,
      const Streams& streams,
      StreamRole role,
      const char* op,
      const CollectiveTag& tag,
      at::Tensor to,
      at::Tensor from);
  PendingCollective(PendingCollective&&) = default;
  PendingCollective& operator=(PendingCollective&&) = default;

  // Calls `issue`, which issues this collective and the others of its launch.
  void issue(const Streams& streams, const std::function<Works(bool async)>& issue);
  // Records that the launch of `other` issued this collective.
  void end_with(const PendingCollective& other, const Streams& streams);

  // Orders later work of the compute stream after the collective; on the CPU blocks until it is
  // done. Repeated calls do nothing. If it failed (a peer died, a timeout, mismatched sizes),
  // throws a c10::DistBackendError that names the collective and the unit.
  void wait(const Streams& streams);

 private:
  void trace_end(const Streams& streams) const;
  void wait_on_host(const WatchedCollective& watched) const;
  void wait_on_device(const Streams& streams) const;

  WatchedCollective watched_; // until wait()
  StreamRole role_ = StreamRole::Compute;
  std::array<at::Tensor, 2> keep_alive_;
  std::shared_ptr<OpenRecord> record_;
  Works works_;
  StreamEvent done_;
};

// Waits for collectives of one role, the last one first: a stream runs it after the others, so one
// wait is enough. Clears the list.
void wait_for_all(std::vector<PendingCollective>& collectives, const Streams& streams);

} // namespace zerocore
