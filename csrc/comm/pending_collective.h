// A collective from before it is issued until it was waited for. Keeps its tensors alive, and tells
// those who look on: the watch of its group, the trace, the log of hand-overs.
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

// Null ones among them where the work is the current stream's.
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// A program's own collective, which takes the place of the backend's; may return null when it is
// done, or where it is the work of the current stream.
using OwnCollective =
    std::function<c10::intrusive_ptr<c10d::Work>(const at::Tensor& to, const at::Tensor& from)>;

// Names a collective in errors and in the trace; `unit` must outlive the collective.
struct CollectiveTag {
  const std::string* unit = nullptr;
  std::shared_ptr<OpenRecord> record; // null when not traced
  UnitId id = -1; // of the unit, -1 for several
  // Bytes that ranks compare, the same on all of them; by default those of the written tensors.
  std::optional<int64_t> nbytes = std::nullopt;
  const OwnCollective* own = nullptr; // null for the backend's, never empty; outlives the call
};

class PendingCollective {
 public:
  PendingCollective() = default;
  // About to be issued on the role's stream, see IssueWatch::begin. It writes `to` and reads
  // `from`, which is undefined where it reads nothing else.
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

  // Issues it, and what goes with it.
  void issue(const Streams& streams, const std::function<Works(bool async)>& issue);
  // It was issued with `other`.
  void end_with(const PendingCollective& other, const Streams& streams);

  // Orders later work of the compute stream behind the collective; on the CPU blocks until it is
  // done. Waiting again does nothing. Throws c10::DistBackendError that names the collective and
  // the unit when it failed (a peer died, a timeout, mismatched sizes).
  void wait(const Streams& streams);

 private:
  void trace_end(const Streams& streams) const;
  void wait_on_host(const WatchedCollective& watched) const;
  void wait_on_device(const Streams& streams) const;

  WatchedCollective watched_; // until it was waited for
  StreamRole role_ = StreamRole::Compute;
  std::array<at::Tensor, 2> keep_alive_;
  std::shared_ptr<OpenRecord> record_;
  Works works_;
  StreamEvent done_;
};

// Waits for all of one role, the last one first: on a stream it is behind the others, so one wait
// is enough. Empties the list.
void wait_for_all(std::vector<PendingCollective>& collectives, const Streams& streams);

} // namespace zerocore
