// Calls the alarm's ledger and the group's guard.
#include "watch/issue_watch.h"

#include <c10/util/Exception.h>

#include <functional>
#include <string_view>
#include <utility>

#include "common/math.h"
#include "common/types.h"
#include "watch/alarm.h"
#include "watch/issue_guard.h"

namespace zerocore {

WatchedCollective::WatchedCollective(
    Alarm* alarm,
    LedgerGroup* group,
    const char* op,
    const std::string& unit,
    int64_t nbytes)
    : alarm_(alarm), op_(op), unit_(&unit) {
  if (alarm_ != nullptr) {
    alarm_->check();
    number_ = alarm_->ledger().begin(*group, op, unit, nbytes);
  }
}

void WatchedCollective::fail(const std::exception& error) const {
  const std::string what = c10::str(op_, " of ", *unit_, " failed: ", message_of(error));
  if (alarm_ != nullptr) {
    alarm_->fail(what);
  }
  TORCH_CHECK_WITH(DistBackendError, false, what, ". Did a rank stop, or call another unit?");
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

IssueWatch::IssueWatch(Alarm* alarm, c10d::ProcessGroup& group, std::shared_ptr<IssueGuard> guard)
    : alarm_(alarm),
      group_(alarm == nullptr ? nullptr : alarm->in_ledger(group)),
      guard_(std::move(guard)),
      user_(guard_ ? guard_->add_user() : 0) {}

WatchedCollective IssueWatch::begin(
    const char* op,
    const std::string& unit,
    UnitId id,
    int64_t nbytes) {
  const WatchedCollective begun(alarm_, group_, op, unit, nbytes);
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
