// Reports each collective to the model's alarm, which names it if it hangs, and to the guard of its
// group, which makes sure that all ranks issue the same one.
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

// One collective, from before it is issued until it was waited for.
class WatchedCollective {
 public:
  WatchedCollective() = default; // of nothing
  // Throws what the alarm does, if it was raised; there may be none, and then no `group`. `op` is a
  // literal, and `unit` outlives this.
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

  // Runs a part of it. An exception raises the alarm, and becomes a c10::DistBackendError with the
  // alarm's sentence, or one that names the collective and the unit.
  template <typename Part>
  void run(const Part& part) const {
    try {
      part();
    } catch (const std::exception& error) {
      fail(error);
    }
  }
  // The same, while the host waits in it for other ranks; `is_last`: it is done behind it.
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
  int64_t number_ = -1; // in the alarm's ledger
};

// Reports the collectives that a model issues on one group.
class IssueWatch {
 public:
  // Alarm and guard may be null. The alarm outlives this.
  IssueWatch(Alarm* alarm, c10d::ProcessGroup& group, std::shared_ptr<IssueGuard> guard);

  // A collective is about to be issued: notes it, and makes sure that the others issue it, too.
  WatchedCollective begin(const char* op, const std::string& unit, UnitId id, int64_t nbytes);
  // From here on ranks also compare `facts`, which must be the same on all of them.
  void set_facts(uint64_t facts) {
    facts_ = facts;
  }
  // The guard of the group, which all models that use the group share; null if it needs none.
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
