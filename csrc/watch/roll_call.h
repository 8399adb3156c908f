// How ranks tell each other where they are: through the store of their process group, which no
// collective can block.
//
// Note [Roll call]
// A rank that misses others makes a call: an entry in the store that all ranks look for in turn.
// Each writes its report beside it. The rank whose entry it is reads them all and writes what
// follows, which the others read: two requests a rank, but for that one. Only if that sentence does
// not come they read the reports themselves.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "watch/rank_report.h"

namespace zerocore {

enum class Call : uint8_t { None, Warning, Alarm }; // in order: the later one outranks the others

// Of one model on one rank. Every function may take as long as the store does, which may be for
// ever; used by one thread.
class RollCall {
 public:
  using Describe = std::function<std::string(const std::vector<RankReport>&)>;

  // `name`: of the model, the same on all its ranks and no other model's.
  RollCall(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::string& name,
      size_t rank,
      size_t size);

  // The call that is to be answered next: another rank's, or else one of this kind.
  Call next(Call wanted);
  // Answers it. Returns what all are told; empty if this rank need not know.
  std::string answer(const RankReport& own, const Describe& describe);
  // The program ends: `how` is for the others. Waits a moment for those that read.
  void note_end(const std::string& how);

  bool can_ask() const {
    return store_ != nullptr;
  }
  // The store has failed: no more of it.
  void give_up() {
    store_ = nullptr;
  }
  // Names the rank or address that the store depends on; for any thread, without the store.
  std::string holder() const;

 private:
  std::string key(const char* what) const;
  std::string key(const char* what, size_t rank) const;
  void find_holder();
  std::vector<RankReport> collect();
  bool read(size_t rank, RankReport& report);

  const size_t rank_, size_;
  c10::intrusive_ptr<c10d::Store> store_; // null: ranks cannot be compared
  int64_t number_ = 0; // of the next call
  bool is_alarm_ = false; // the one that next() found
  bool is_own_ = false;
  int holder_polls_ = 10;
  std::string address_; // of the store
  std::atomic<int64_t> holder_ = -1;
};

} // namespace zerocore
