// Keeps ranks from issuing different collectives on a gloo group.
//
// Note [Known sequences]
// Gloo ends the process when a rank sends more than another one has room for, in a thread of its
// own where nothing can catch it, and takes what is too small without a word. So before a rank
// issues a collective that it has not always issued at this point, it compares with all others.
// A point is what was issued before, up to a depth. Training repeats itself: after the first steps
// every point has one successor, which is then issued without asking. A point of more than one is
// told apart by what was issued before it, up to a larger depth.
// Two ranks never issue different collectives as each other's counterpart: as long as they have
// issued the same ones, they know the same points. If the point has one successor, a rank that is
// about to issue another one asks, which nobody answers, until the alarm; in any other case all
// ranks ask, and see that they differ.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace zerocore {

class ControlLink;

// Collectives that a point is told apart by: in most programs the last 16 tell the next one; where
// several follow them, as after 16 equal ones, the last 128 do. Powers of two.
inline constexpr std::array<size_t, 2> kDepths = {16, 128};

// The collectives that follow others, as far as all ranks are known to agree about it.
class KnownSequence {
 public:
  // The next collective, by a hash of all that must be the same on all ranks. True if the ranks
  // must compare it first.
  bool advance(uint64_t collective);
  size_t num_points() const {
    return levels_[0].successors.size() + levels_[1].successors.size();
  }

 private:
  static constexpr size_t kMaxPoints = 1 << 15; // of a level; more, and both forget all
  struct Successor {
    uint64_t collective = 0;
    bool only = true;
  };
  struct Level {
    uint64_t point = 0; // a hash of the last collectives
    std::unordered_map<uint64_t, Successor> successors = {};
  };

  std::array<Level, kDepths.size()> levels_; // by depth
  std::array<uint64_t, kDepths.back()> last_ = {};
  size_t next_ = 0;
};

// One for a group, however many models use it: their collectives come in one order, too. It lives
// as long as the group: when a model is freed differs between ranks. Used by the thread that
// issues.
class IssueGuard {
 public:
  explicit IssueGuard(ControlLink& link) : link_(link) {} // of the group, which has it

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
  ControlLink& link_;
  KnownSequence sequence_;
  uint64_t num_issued_ = 0;
  uint64_t num_compared_ = 0;
  uint64_t num_users_ = 0;
};

} // namespace zerocore
