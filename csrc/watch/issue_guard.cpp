// See Note [Known sequences]. Ranks compare collectives by messages: gloo matches collectives by
// their numbers, so extra collectives would shift the numbers of ranks that do not compare.
#include "watch/issue_guard.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "common/math.h"
#include "watch/control_link.h"

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

// By level: the factor, in a point's hash, of the oldest collective, which the next one replaces.
constexpr std::array kLeaving = {power(kBase, kDepths[0] - 1), power(kBase, kDepths[1] - 1)};

} // namespace

// Clears both levels together, so that each point of the second level is also one of the first.
bool KnownSequence::advance(uint64_t collective) {
  const auto is_full = [](const Level& level) { return level.successors.size() >= kMaxPoints; };
  if (std::ranges::any_of(levels_, is_full)) {
    std::ranges::for_each(levels_, [](Level& level) { level.successors.clear(); });
  }
  bool ask = true;
  for (size_t i = 0; i < levels_.size(); ++i) {
    Level& level = levels_[i];
    if (ask) {
      const auto [known, is_new] =
          level.successors.try_emplace(level.point, Successor{collective, true});
      known->second.only = known->second.only && known->second.collective == collective;
      ask = is_new || !known->second.only;
    }
    // The hash is a polynomial over the last collectives: subtract the oldest one.
    const uint64_t oldest = last_[(next_ - kDepths[i]) % last_.size()];
    level.point = (level.point - oldest * kLeaving[i]) * kBase + collective;
  }
  last_[next_++ % last_.size()] = collective;
  return ask;
}

void IssueGuard::compare(uint64_t collective) {
  ++num_compared_;
  const auto own = static_cast<int64_t>(mix(collective, num_issued_));
  const ControlMessage heard =
      link_.wait(link_.begin(ControlMessage::of(MessageKind::Collective, {own, ~own})));
  TORCH_CHECK_WITH(
      DistBackendError,
      heard.words[0] == ~heard.words[1], // the maximum and the minimum
      "the ranks are about to issue different collectives");
}

} // namespace zerocore
