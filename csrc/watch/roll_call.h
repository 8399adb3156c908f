// Exchanges the ranks' positions through the store of their process group, which no collective can
// block.
//
// Note [Roll call]
// A rank that waits for others opens a call: it sets a key in the store, which every rank checks
// regularly. Each rank then appends its report to a list. The rank that opened the call reads the
// list when all ranks have answered, or after 3 s, and writes the sentence for all. If that rank is
// gone, the first rank that has waited 3.5 s for the sentence reads the list instead. A call costs
// each rank 5 requests to the store, and one request for each check.
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

// The roll calls of one model on one rank; for one thread. Each function may block as long as the
// store does, even for ever.
class RollCall {
 public:
  using Report = std::function<RankReport()>;
  // Makes the sentence for all ranks from their reports, by rank; empty if training continues.
  // `must_end`: some rank cannot continue.
  using Describe = std::function<std::string(const std::vector<RankReport>&, bool must_end)>;

  // `name`: the model's name, equal on its ranks and unique.
  RollCall(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::string& name,
      size_t rank,
      size_t size);

  // Checks the store. Answers the call of another rank, or opens a call if this rank `asks`.
  // Returns the call's sentence once it is written.
  std::optional<std::string> poll(
      bool asks,
      bool must_end,
      const Report& report,
      const Describe& describe);
  // Tells the other ranks how this program ends. Rank 0 may hold the store, so it waits briefly
  // until the other programs end.
  void note_end(const std::string& how);

  bool can_ask() const {
    return store_ != nullptr;
  }
  // Returns whether this rank has answered a call that is still open.
  bool is_open() const {
    return answered_at_.has_value();
  }
  // Stops using the store, after a failure of the store or at the end of the program.
  void give_up() {
    store_ = nullptr;
    answered_at_.reset();
  }
  // Returns a description of the store for errors. Thread-safe; it sends no request.
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
  std::optional<std::chrono::steady_clock::time_point> answered_at_; // of the open call
  bool reads_ = false; // this rank reads the reports
  bool must_end_ = false; // this rank has told the others that it must end
};

} // namespace zerocore
