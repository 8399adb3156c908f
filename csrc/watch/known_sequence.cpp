// See Note [Known sequences].
#include "watch/known_sequence.h"

namespace zerocore {

namespace {

constexpr uint64_t kBase = 0x9e3779b97f4a7c15; // odd, so that powers keep all bits

constexpr uint64_t power(uint64_t base, size_t exponent) {
  uint64_t result = 1;
  for (size_t i = 0; i < exponent; ++i) {
    result *= base;
  }
  return result;
}

} // namespace

bool KnownSequence::advance(uint64_t collective) {
  if (successors_.size() >= kMaxPoints) {
    successors_.clear();
  }
  const auto [known, is_new] = successors_.try_emplace(point_, Successor{collective, true});
  known->second.only = known->second.only && known->second.collective == collective;
  const bool ask = is_new || !known->second.only;
  uint64_t& oldest = last_[next_++ % kDepth];
  // A polynomial over the last ones: what leaves is subtracted.
  point_ = (point_ - oldest * power(kBase, kDepth - 1)) * kBase + collective;
  oldest = collective;
  return ask;
}

} // namespace zerocore
