// How ranks tell each other where they are: through the store of their process group, which no
// collective can block.
//
// Note [Roll call]
// A rank that misses others makes a call: an entry in the store that all ranks look for in turn.
// Each appends its report to one list. The rank whose entry it is reads the list and writes what
// follows, for which the others look. If it does not come, the first rank that misses it reads in
// its place. So a call takes 3 requests a rank and one for each look, and the reader's three.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "watch/rank_report.h"

namespace zerocore {

// Of one rank. Every function may take as long as the store does, which may be for ever; used by
// one thread.
class RollCall {
 public:
  using Report = std::function<RankReport()>;
  // The alarm's sentence; empty if ranks are to wait on.
  using Describe = std::function<std::string(const std::vector<RankReport>&)>;

  // `name`: the same on all ranks, and no other roll call's.
  RollCall(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::string& name,
      size_t rank,
      size_t size);

  // Makes a call if this rank wants one, or answers that of another; returns what came of it, once.
  std::optional<std::string> step(bool wants, const Report& own, const Describe& describe);
  // The program or its group ends. Behind an alarm the others get a moment to read: the store may
  // end with this process.
  void note_end(const std::string& report, bool behind_alarm);

  bool is_under_way() const {
    return told_.has_value();
  }
  // From any thread.
  bool can_ask() const {
    return can_ask_;
  }
  // The store has failed.
  void give_up() {
    can_ask_ = false;
  }
  const std::string& holder() const {
    return holder_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::string key(const char* what) const;
  bool is_complete();
  std::vector<RankReport> collect();
  void append(const std::string& list, const std::string& text);

  const size_t rank_, size_;
  c10::intrusive_ptr<c10d::Store> store_; // null: ranks cannot be compared
  std::string holder_; // names the store
  std::atomic<bool> can_ask_ = false;
  int64_t number_ = 0; // of the next call, or that which is under way
  std::optional<Clock::time_point> told_; // when this rank did
  bool is_own_ = false;
  bool is_overdue_ = false; // as this rank has told
  Clock::time_point next_look_;
  std::chrono::milliseconds pause_{};
};

} // namespace zerocore
