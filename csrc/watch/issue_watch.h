// Reports each collective to the model's alarm, which names it if it hangs, and to the group's
// guard, which checks that all ranks issue the same one.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "common/types.h"

namespace c10d {
class ProcessGroup;
} // namespace c10d

namespace zerocore {

class Alarm;
class IssueGuard;
struct LedgerGroup;

// A collective, from before it is issued until it is complete.
class WatchedCollective {
 public:
  WatchedCollective() = default; // watches nothing
  // `alarm` and `group` are both null, or neither. Throws the alarm's error if the alarm was
  // raised. `op` is a literal, and `unit` must outlive the object.
  WatchedCollective(
      Alarm* alarm,
      LedgerGroup* group,
      const char* op,
      const std::string& unit,
      int64_t nbytes);

  explicit operator bool() const {
    return op_ != nullptr;
  }
  const char* op() const {
    return op_;
  }
  const std::string& unit() const {
    return *unit_;
  }

  // Runs a part of the collective. If it throws, raises the alarm and throws c10::DistBackendError:
  // with the alarm's sentence, or without an alarm with the collective and the unit.
  template <typename Part>
  void run(const Part& part) const {
    try {
      part();
    } catch (const std::exception& error) {
      fail(error);
    }
  }
  // Runs a part in which the host waits for other ranks. `is_last`: the part completes the
  // collective.
  template <typename Part>
  void wait(const Part& part, bool is_last = true) const {
    begin_wait();
    run(part);
    end_wait(is_last);
  }

 private:
  [[noreturn]] void fail(const std::exception& error) const;
  void begin_wait() const;
  void end_wait(bool is_last) const;

  Alarm* alarm_ = nullptr;
  const char* op_ = nullptr;
  const std::string* unit_ = nullptr;
  int64_t number_ = -1; // its number in the alarm's ledger
};

// Reports the collectives that a model issues on one group.
class IssueWatch {
 public:
  // Alarm and guard may be null. The alarm must outlive the object.
  IssueWatch(Alarm* alarm, c10d::ProcessGroup& group, std::shared_ptr<IssueGuard> guard);

  // Records a collective before its issue, and checks that the other ranks issue it, too.
  WatchedCollective begin(const char* op, const std::string& unit, UnitId id, int64_t nbytes);
  // Makes the ranks also compare `facts` from now on; the facts must be equal on all ranks.
  void set_facts(uint64_t facts) {
    facts_ = facts;
  }
  // Returns the group's guard, which all models of the group share; null if the group needs none.
  const IssueGuard* guard() const {
    return guard_.get();
  }

 private:
  Alarm* alarm_;
  LedgerGroup* group_; // null without an alarm
  std::shared_ptr<IssueGuard> guard_;
  uint64_t user_ = 0;
  uint64_t facts_ = 0;
};

} // namespace zerocore
