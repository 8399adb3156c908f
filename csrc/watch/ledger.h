// A rank's last collectives, the report of them that ranks write for each other, and the sentence
// that follows from the reports of all.
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

// One collective of a model, as ranks tell each other.
struct LedgerEntry {
  int64_t number = -1;
  bool done = false;
  std::string what; // "all_gather of 'unit' (288 bytes)", the same on all ranks
};

// Where a rank is among the collectives that a model issues on one group.
struct GroupPosition {
  std::string name; // of model and group: the same on all ranks of the group, and no other group's
  int64_t next = 0; // number of the next one that the rank issues
  int64_t waiting = -1; // number of the one that the host waits in
  int64_t thread = 0; // the thread that has issued the last one; 0 if there was none
  std::string what; // the one that the host waits in, without its bytes
};

struct RankReport {
  std::vector<LedgerEntry> entries; // the last ones, oldest first
  int64_t waiting = -1; // number of the collective that the host waits in
  std::string trainable; // '1' or '0' for each parameter of the model
  std::string elsewhere; // what the process waits in apart from the ledger; empty if it does not
  std::vector<GroupPosition> groups; // of all models of the process
  bool answered = false; // else nothing is known but `ended`
  std::optional<std::string> ended; // how the program ended

  const LedgerEntry* find(int64_t number) const; // null if there is none
  bool waits_in(int64_t number) const {
    return answered && waiting == number;
  }
  std::string encode() const; // what a rank that answered knows
  static RankReport decode(const std::string& text);
};

// Counts the collectives that one model issues on one group.
struct LedgerGroup {
  explicit LedgerGroup(std::string name) : name(std::move(name)) {}

  const std::string name; // see GroupPosition
  std::atomic<int64_t> next = 0;
  std::atomic<int64_t> thread = 0;
};

// A ring: nothing is allocated while training. Written by the thread that trains, which takes no
// lock and reads no clock for a collective; read by the watchdog, which may find a collective that
// is just being noted half written. Numbers count the collectives of a model over all its groups:
// every rank issues them in one order, so equal numbers are the same collective.
class Ledger {
 public:
  // The group of this name, which lives as long as the ledger.
  LedgerGroup& group(const std::string& name);
  // A collective is about to be issued; its number. `op` is a literal, `unit` outlives the ledger's
  // use of it, which ends with forget().
  int64_t begin(LedgerGroup& group, const char* op, const std::string& unit, int64_t nbytes);
  // The host waits in it from here on.
  void begin_wait(int64_t number);
  // Not any more; the collective itself may go on.
  void end_wait();
  // It was waited for.
  void finish(int64_t number);

  // Whether the parameters from `first` on require grad on this rank.
  void set_trainable(size_t first, const std::vector<bool>& flags);
  // Reports all that the ledger knows.
  RankReport report() const;
  // For the watchdog: how long the host has waited in one collective, from the first call that
  // finds it there.
  std::chrono::steady_clock::duration silence();
  // The units' names go away.
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
  std::atomic<int64_t> num_waits_ = 0; // begun
  mutable std::mutex mutex_; // of what follows, and while names of units are read
  std::deque<LedgerGroup> groups_;
  int64_t oldest_ = 0;
  std::string trainable_;
  // Of the watchdog alone.
  int64_t seen_ = -1; // waited in
  std::chrono::steady_clock::time_point seen_since_;
};

// Whether the reports, by rank, prove that some ranks wait for each other. Each of these waits in a
// collective that another one of them has not issued, or has issued otherwise; and there the thread
// that issues on this group waits as well.
bool wait_for_ever(const std::vector<RankReport>& reports);

// Names collective, units and ranks, in sentences. `reports` are by rank, `params` the names behind
// RankReport::trainable, `model` its class, `advice` what to do about a rank that is only slow.
// `unreachable`: what the others could not be asked without; empty if they were.
std::string describe(
    const std::vector<RankReport>& reports,
    const std::vector<std::string>& params,
    const std::string& model,
    const std::string& advice,
    const std::string& unreachable = "");

} // namespace zerocore
