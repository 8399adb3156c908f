// A rank's last collectives, the reports of them that ranks exchange, and the sentence made from
// the reports of all ranks.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zerocore {

// A collective of a model, in a report.
struct LedgerEntry {
  int64_t number = -1;
  bool done = false;
  std::string what; // such as "all_gather of 'unit' (288 bytes)"; equal on all ranks
};

// A rank's position among the collectives that a model issues on one group.
struct GroupPosition {
  std::string name; // names model and group; equal on the group's ranks, and unique
  int64_t next = 0; // number of the next collective that the rank issues
  int64_t waiting = -1; // number of the collective in which the host waits
  int64_t thread = 0; // the thread that issued the last collective; 0 before the first one
  std::string what; // the collective in which the host waits, without its bytes
};

struct RankReport {
  std::vector<LedgerEntry> entries; // the last collectives, oldest first
  int64_t waiting = -1; // number of the collective in which the host waits
  std::string trainable; // '1' or '0' for each parameter of the model
  std::string elsewhere; // a wait outside of the ledger; empty without one
  std::vector<GroupPosition> groups; // positions of all models of the process
  bool answered = false; // if false, only `ended` is known
  std::optional<std::string> ended; // how the program ended

  const LedgerEntry* find(int64_t number) const; // null if the report lacks it
  bool waits_in(int64_t number) const {
    return answered && waiting == number;
  }
  std::string encode() const; // only for a rank that answered
  static RankReport decode(const std::string& text);
};

// Counts the collectives that one model issues on one group.
struct LedgerGroup {
  explicit LedgerGroup(std::string name) : name(std::move(name)) {}

  const std::string name; // see GroupPosition
  std::atomic<int64_t> next = 0;
  std::atomic<int64_t> thread = 0;
};

// A ring of a model's last collectives; training allocates nothing. The training thread writes it
// without a lock, and without reading a clock. The watchdog reads it, and may find a half-written
// entry. Numbers count a model's collectives over all its groups. All ranks issue them in one
// order, so a number means the same collective on all ranks.
class Ledger {
 public:
  // Returns the group with this name, which lives as long as the ledger.
  LedgerGroup& group(const std::string& name);
  // Records a collective before its issue, and returns its number. `op` is a literal. `unit` must
  // live until forget().
  int64_t begin(LedgerGroup& group, const char* op, const std::string& unit, int64_t nbytes);
  // Records that the host begins to wait in the collective.
  void begin_wait(int64_t number);
  // Records that the host's wait is over; the collective may still run.
  void end_wait();
  // Records that the collective is complete.
  void finish(int64_t number);

  // Records which parameters, from `first` on, require grad on this rank.
  void set_trainable(size_t first, const std::vector<bool>& flags);
  RankReport report() const;
  // Returns the length of the host's wait in one collective, since the first call that saw this
  // wait. Only for the watchdog.
  std::chrono::steady_clock::duration silence();
  // Drops all entries: the units' names are about to be freed.
  void forget();

 private:
  static constexpr size_t kKept = 64;
  struct Slot {
    std::atomic<LedgerGroup*> group = nullptr;
    std::atomic<int64_t> number_in_group = 0;
    std::atomic<const char*> op = nullptr;
    std::atomic<const std::string*> unit = nullptr;
    std::atomic<int64_t> nbytes = 0;
    std::atomic<bool> done = false;
  };

  std::vector<GroupPosition> positions() const;

  std::array<Slot, kKept> slots_;
  std::atomic<int64_t> next_ = 0;
  std::atomic<int64_t> waiting_ = -1;
  std::atomic<int64_t> num_waits_ = 0; // number of waits so far
  mutable std::mutex mutex_; // guards all members below, and reads of units' names
  std::deque<LedgerGroup> groups_;
  int64_t oldest_ = 0;
  std::string trainable_;
  // Only for the watchdog.
  int64_t seen_ = -1; // the collective in which it last saw the host
  std::chrono::steady_clock::time_point seen_since_;
};

// Returns a number of the calling thread, which is not 0.
int64_t this_thread();

// Returns whether the reports, by rank, prove that some ranks wait for each other for ever. Such a
// rank waits in a collective for another such rank. The other rank has issued a different
// collective or none, and its thread that issues collectives on this group waits as well.
bool wait_for_ever(const std::vector<RankReport>& reports);

// Makes the sentence that names the collective, its unit and the ranks. `reports` are by rank.
// `params` names RankReport::trainable; `model` is the model's class. `advice` is for a rank that
// is only slow. `unreachable` names the store if it did not answer, else it is empty.
std::string describe(
    const std::vector<RankReport>& reports,
    const std::vector<std::string>& params,
    const std::string& model,
    const std::string& advice,
    const std::string& unreachable = "");

} // namespace zerocore
