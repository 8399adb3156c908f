// How ranks tell each other where they are: through the store of their process group, which no
// collective can block.
//
// Note [Roll call]
// A rank that misses others makes a call: an entry in the store that all ranks look for in turn.
// Each appends a line to one list: its rank, and the digest of its report, which it writes if no
// other rank had the same. The rank whose entry it is reads the list and the few reports, and
// writes the sentence that follows, for which the others wait. If it does not come, the first rank
// that misses it reads in its place. So a call takes at most 8 requests a rank, and as many of the
// one that reads as there are different reports, and one for each moment that it waits.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "watch/ledger.h"

namespace zerocore {

enum class RollKind : uint8_t {
  None,
  Warning,
  Alarm
}; // in order: the later one outranks the others

// Of one model on one rank. Every function may take as long as the store does, which may be for
// ever; used by one thread.
class RollCall {
 public:
  using Describe = std::function<std::string(const std::vector<RankReport>&)>;

  // Behind this on all ranks, their roll calls know if one of them holds the store; a launcher may.
  static void note_holder(const c10::intrusive_ptr<c10d::Store>& store, int rank);
  // `name`: of the model, the same on all its ranks and no other model's.
  RollCall(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::string& name,
      size_t rank,
      size_t size);

  // The call that is to be answered next: another rank's, or else one of this kind.
  RollKind next(RollKind wanted);
  // Answers it.
  void tell(const RankReport& own);
  // Behind tell(): returns what all are told; empty if this rank need not know.
  std::string hear(const Describe& describe);
  // The program ends: `how` is for the others. The rank that holds the store waits a moment for
  // them, or for those that read an alarm.
  void note_end(const std::string& how);

  bool can_ask() const {
    return store_ != nullptr;
  }
  // The store has failed, or the program ends: no more of it.
  void give_up() {
    store_ = nullptr;
  }
  // Names the rank or address that the store depends on; for any thread, without the store.
  std::string holder() const;

 private:
  std::string key(const char* what) const;
  std::vector<RankReport> collect();
  std::vector<std::pair<size_t, std::string>> lines(const std::string& list);
  bool wait_for_sentence();

  const size_t rank_, size_;
  c10::intrusive_ptr<c10d::Store> store_; // null: ranks cannot be compared
  int64_t number_ = 0; // of the next call
  bool is_alarm_ = false; // the one that next() found
  bool is_own_ = false;
  std::chrono::steady_clock::time_point told_; // when this rank did
  std::string address_; // of the store
  int64_t holder_ = -1; // the rank, if it is one of them
};

} // namespace zerocore
