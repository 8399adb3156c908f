// Keeps ranks from issuing different collectives on a gloo group.
//
// Note [Known sequences]
// If a rank sends more than another has room for, gloo ends the process, in a thread of its own
// where the error cannot be caught. It accepts too few bytes silently. So a rank compares a
// collective with all other ranks before it issues it, unless this collective has always come at
// this point. A point is a hash of the last collectives, up to a depth. Training repeats itself:
// after the first steps each point has one successor, which is issued without a comparison. If a
// point has several successors, a larger depth tells them apart.
// Two ranks never issue different collectives as counterparts. While they have issued the same ones
// they know the same points. If the point has one successor, a rank that is about to issue another
// collective asks; no rank answers, and the alarm comes. In any other case all ranks ask, and see
// that they differ.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace zerocore {

class ControlLink;

// The depths, which are powers of two. In most programs the last 16 collectives determine the next
// one. If they do not, as after 16 equal ones, the last 128 do.
inline constexpr std::array<size_t, 2> kDepths = {16, 128};

// Knows which collective follows which, as far as all ranks agree.
class KnownSequence {
 public:
  // Advances by one collective: a hash of all that must be equal on all ranks. Returns whether the
  // ranks must compare it first.
  bool advance(uint64_t collective);
  size_t num_points() const {
    return levels_[0].successors.size() + levels_[1].successors.size();
  }

 private:
  static constexpr size_t kMaxPoints = 1 << 15; // of a level; beyond, both levels start again
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

// The guard of a group, shared by all models that use it, because all their collectives need one
// order. It lives as long as the group, since ranks free a model at different times. The thread
// that issues collectives uses it.
class IssueGuard {
 public:
  explicit IssueGuard(ControlLink& link) : link_(link) {} // `link` owns the guard

  // Returns a number for a new user, equal on all ranks.
  uint64_t add_user() {
    return ++num_users_;
  }
  // Notes a collective that is about to be issued: a hash of all that must be equal on all ranks.
  // Returns whether the ranks must compare it first.
  bool must_compare(uint64_t collective) {
    ++num_issued_;
    return sequence_.advance(collective);
  }
  // Blocks until all ranks have sent their hash. Throws c10::DistBackendError if they differ.
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
