// Keeps ranks from issuing different collectives on a gloo group, see Note [Known sequences].
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "watch/known_sequence.h"

namespace zerocore {

// One for a group, however many models use it: their collectives come in one order, too. It lives
// as long as the group: when a model is freed differs between ranks. Used by the thread that
// issues.
class IssueGuard {
 public:
  // That of the group.
  static std::shared_ptr<IssueGuard> of(const c10::intrusive_ptr<c10d::Backend>& backend);

  // A new user's number, the same on all ranks.
  uint64_t add_user() {
    return ++num_users_;
  }
  // A collective is about to be issued; its hash is of all that must be the same on all ranks.
  // True if the ranks must compare it before.
  bool must_compare(uint64_t collective) {
    ++num_issued_;
    return sequence_.advance(collective);
  }
  // Blocks until all ranks have said theirs; throws c10::DistBackendError if they differ.
  void compare(uint64_t collective);
  uint64_t num_compared() const {
    return num_compared_;
  }
  size_t num_points() const {
    return sequence_.num_points();
  }

 private:
  explicit IssueGuard(c10::weak_intrusive_ptr<c10d::Backend> backend)
      : backend_(std::move(backend)) {}

  c10::weak_intrusive_ptr<c10d::Backend> backend_;
  KnownSequence sequence_;
  uint64_t num_issued_ = 0;
  uint64_t num_compared_ = 0;
  uint64_t num_users_ = 0;
};

} // namespace zerocore
