// How ranks tell each other where they are: through the store of their process group, which no
// collective can block.
//
// Note [Roll call]
// A rank that misses others makes a call: a key in the store that all ranks look for in turn. Each
// rank appends its report to one list. The rank that has made the call reads the list when all have
// answered or 3 s are over, and writes what the ranks are told. If nothing comes, the first rank
// that misses it reads instead. A call takes 5 requests a rank, and one for each look at the store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "watch/ledger.h"

namespace zerocore {

// Of one model on one rank. Every function may take as long as the store does, which may be for
// ever; used by one thread.
class RollCall {
 public:
  using Report = std::function<RankReport()>;
  // Makes the sentence for all ranks from their reports; empty if all go on. `must_end`: some rank
  // can not.
  using Describe = std::function<std::string(const std::vector<RankReport>&, bool must_end)>;

  // `name`: of the model, the same on all its ranks and no other model's.
  RollCall(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::string& name,
      size_t rank,
      size_t size);

  // Looks at the store: answers the call of another rank, or one that this rank `asks` for.
  // Returns what the ranks are told, once they are.
  std::optional<std::string> poll(
      bool asks,
      bool must_end,
      const Report& report,
      const Describe& describe);
  // The program ends: `how` is for the others. Rank 0 waits a moment for theirs, as it may hold the
  // store.
  void note_end(const std::string& how);

  bool can_ask() const {
    return store_ != nullptr;
  }
  // This rank has answered a call that is not over.
  bool is_open() const {
    return told_.has_value();
  }
  // The store has failed, or the program ends: no more of it.
  void give_up() {
    store_ = nullptr;
    told_.reset();
  }
  // Names the store; for any thread, without a request.
  const std::string& store_name() const {
    return store_name_;
  }

 private:
  std::string key(const char* what) const;
  std::vector<std::pair<size_t, std::string>> records(const std::string& list);
  std::optional<std::string> read(const Describe& describe);

  const size_t rank_, size_;
  c10::intrusive_ptr<c10d::Store> store_; // null: ranks cannot be compared
  std::string store_name_ = "the store of the process group";
  int64_t number_ = 0; // of the next call
  std::optional<std::chrono::steady_clock::time_point> told_; // when this rank did, in an open call
  bool reads_ = false; // the reports of the open call
  bool must_end_ = false; // as the others were told
};

} // namespace zerocore
