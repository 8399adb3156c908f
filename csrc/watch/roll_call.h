// How ranks tell each other where they are: through the store of their process group, which no
// collective can block.
//
// Note [Roll call]
// A rank that waits for others opens a call: it sets a key in the store, which every rank checks
// now and then. Each rank then appends its report to a list. The rank that opened the call reads
// the list when all ranks have answered, or after 3 s, and writes the sentence for all. If that
// rank is gone, the first rank that has waited 3.5 s for the sentence reads the list instead. A
// call costs each rank 5 requests to the store, and one request for each check.
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

// The roll calls of one model on one rank, used by one thread. Each function may block as long as
// the store does, which may be for ever.
class RollCall {
 public:
  using Report = std::function<RankReport()>;
  // Makes the sentence for all ranks from their reports, by rank. It is empty if training goes on.
  // `must_end`: on some rank it cannot go on.
  using Describe = std::function<std::string(const std::vector<RankReport>&, bool must_end)>;

  // `name`: the model's name, equal on its ranks and unique.
  RollCall(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::string& name,
      size_t rank,
      size_t size);

  // Checks the store. Answers the call of another rank, or opens a call if this rank `asks` for
  // one. Returns the sentence of the call once it is written.
  std::optional<std::string> poll(
      bool asks,
      bool must_end,
      const Report& report,
      const Describe& describe);
  // Tells the other ranks how this program ends. Rank 0 may hold the store, so it waits a moment
  // for the other programs to end.
  void note_end(const std::string& how);

  bool can_ask() const {
    return store_ != nullptr;
  }
  // Returns whether this rank has answered a call that is not over.
  bool is_open() const {
    return told_.has_value();
  }
  // Stops using the store: it has failed, or the program ends.
  void give_up() {
    store_ = nullptr;
    told_.reset();
  }
  // Returns words that name the store. Any thread may call it; it sends no request.
  const std::string& store_name() const {
    return store_name_;
  }

 private:
  std::string key(const char* what) const;
  std::vector<std::pair<size_t, std::string>> records(const std::string& list);
  std::optional<std::string> read(const Describe& describe);

  const size_t rank_, size_;
  c10::intrusive_ptr<c10d::Store> store_; // null if ranks cannot be asked
  std::string store_name_ = "the store of the process group";
  int64_t number_ = 0; // number of the open call, or of the next one
  std::optional<std::chrono::steady_clock::time_point> told_; // when this rank answered it
  bool reads_ = false; // this rank reads the reports
  bool must_end_ = false; // this rank has told the others that it must end
};

} // namespace zerocore
