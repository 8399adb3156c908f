// See Note [Known sequences]. Ranks compare by messages: collectives of their own would take the
// numbers by which gloo matches those of ranks that do not compare.
#include "watch/issue_watch.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <utility>

#include "common/math.h"
#include "common/types.h"
#include "watch/alarm.h"
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

// By level: the factor of the collective that leaves, in the hash of those before a point.
constexpr std::array kLeaving = {power(kBase, kDepths[0] - 1), power(kBase, kDepths[1] - 1)};

} // namespace

// Both levels are forgotten at once: a point of the second one is then always one of the first,
// too.
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
    // A polynomial over the last ones: what leaves is subtracted.
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
      heard.words[0] == ~heard.words[1], // the largest and the smallest one
      "the ranks are about to issue different collectives");
}

WatchedCollective::WatchedCollective(
    Alarm* alarm,
    const char* op,
    const std::string& unit,
    int64_t nbytes)
    : alarm_(alarm), op_(op), unit_(&unit) {
  if (alarm_ != nullptr) {
    alarm_->check();
    number_ = alarm_->ledger().begin(op, unit, nbytes);
  }
}

void WatchedCollective::fail(const std::exception& error) const {
  const std::string what = c10::str(op_, " of ", *unit_, " failed: ", message_of(error));
  if (alarm_ != nullptr) {
    alarm_->fail(what);
  }
  TORCH_CHECK_WITH(
      DistBackendError, false, what, ". Did a rank stop, or call other units than this one?");
}

void WatchedCollective::begin_wait() const {
  if (alarm_ != nullptr) {
    alarm_->ledger().begin_wait(number_);
  }
}

void WatchedCollective::end_wait(bool is_last) const {
  if (alarm_ != nullptr) {
    is_last ? alarm_->ledger().finish(number_) : alarm_->ledger().end_wait();
  }
}

IssueWatch::IssueWatch(Alarm* alarm, std::shared_ptr<IssueGuard> guard)
    : alarm_(alarm), guard_(std::move(guard)), user_(guard_ ? guard_->add_user() : 0) {}

WatchedCollective IssueWatch::begin(
    const char* op,
    const std::string& unit,
    UnitId id,
    int64_t nbytes) {
  const WatchedCollective begun(alarm_, op, unit, nbytes);
  if (guard_ != nullptr) {
    uint64_t collective = mix(user_, std::hash<std::string_view>()(op));
    collective = mix(mix(collective, static_cast<uint64_t>(id)), static_cast<uint64_t>(nbytes));
    collective = mix(collective, facts_);
    if (guard_->must_compare(collective)) {
      begun.wait([&] { guard_->compare(collective); }, /*is_last=*/false);
    }
  }
  return begun;
}

} // namespace zerocore
