// Which collective follows which, as far as all ranks are known to agree about it.
//
// Note [Known sequences]
// Gloo ends the process when a rank sends more than another one has room for, in a thread of its
// own where nothing can catch it, and takes what is too small without a word. So before a rank
// issues a collective that it has not always issued at this point, it compares with all others.
// A point is what was issued before, up to a depth. Training repeats itself: after the first steps
// every point has one successor, which is then issued without asking.
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

class KnownSequence {
 public:
  // The next collective, by a hash of all that must be the same on all ranks. True if the ranks
  // must compare it first.
  bool advance(uint64_t collective);
  size_t num_points() const {
    return successors_.size();
  }

 private:
  static constexpr size_t kDepth = 16;
  static constexpr size_t kMaxPoints = 1 << 15; // forgotten when there are more
  struct Successor {
    uint64_t collective = 0;
    bool only = true;
  };

  uint64_t point_ = 0; // a hash of the last kDepth collectives
  std::array<uint64_t, kDepth> last_ = {};
  size_t next_ = 0;
  std::unordered_map<uint64_t, Successor> successors_;
};

} // namespace zerocore
