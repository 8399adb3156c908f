// Keeps ranks from issuing different collectives on a gloo group.
//
// Note [Known sequences]
// If a rank sends more than another rank expects, gloo ends the process, in a thread of its own
// where the error cannot be caught. It accepts too few bytes silently. So before a rank issues a
// collective, it compares the collective with all other ranks, unless the same collective has
// always come at this point. A point is a hash of the last collectives, up to a depth. Training
// repeats itself: after the first steps each point has one successor, which needs no comparison. If
// a point has several successors, a larger depth tells them apart. Two ranks never issue different
// collectives as counterparts. As long as they issue the same ones, they know the same points. If
// the point has one successor, a rank with another collective asks, no rank answers, and the alarm
// is raised. Otherwise all ranks ask, and see the difference.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace zerocore {

class ControlLink;

// The depths, powers of two. In most programs the last 16 collectives determine the next one.
// Otherwise, as after 16 equal ones, the last 128 do.
inline constexpr std::array<size_t, 2> kDepths = {16, 128};

// Knows the successors of each point, as far as all ranks agree.
class KnownSequence {
 public:
  // Advances by one collective; `collective` hashes its facts that all ranks must share. Returns
  // whether the ranks must compare it first.
  bool advance(uint64_t collective);
  size_t num_points() const {
    return levels_[0].successors.size() + levels_[1].successors.size();
  }

 private:
  static constexpr size_t kMaxPoints = 1 << 15; // per level; at more points both levels are cleared
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

// The guard of a group. All models of the group share it, because their collectives need one order.
// It lives as long as the group, since ranks free a model at different times. Only the thread that
// issues collectives uses it.
class IssueGuard {
 public:
  explicit IssueGuard(ControlLink& link) : link_(link) {} // `link` owns the guard

  // Returns a number for a new user, equal on all ranks.
  uint64_t add_user() {
    return ++num_users_;
  }
  // Records a collective before its issue; `collective` hashes its facts that all ranks must share.
  // Returns whether the ranks must compare it first.
  bool must_compare(uint64_t collective) {
    ++num_issued_;
    return sequence_.advance(collective);
  }
  // Blocks until all ranks have sent their hash. Throws c10::DistBackendError if the hashes differ.
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
