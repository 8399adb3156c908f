// Remembers a model's last collectives on this rank, for the comparison with other ranks.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace zerocore {

// One collective of a model, as ranks tell each other.
struct LedgerEntry {
  int64_t number = -1;
  std::string op;
  std::string unit;
  int64_t nbytes = 0;
  bool done = false;

  bool is_same(const LedgerEntry& other) const {
    return op == other.op && unit == other.unit && nbytes == other.nbytes;
  }
};

// A copy of a ledger's content at one moment, oldest entry first.
struct LedgerState {
  int64_t id = 0; // of the model, the same on all ranks
  std::string model; // its class
  std::string call; // that the host waits in, such as "a forward"; empty if unknown
  std::vector<LedgerEntry> entries;
  int64_t next = 0; // number of the next collective
  int64_t waiting = -1; // number of the collective that the host waits in
  std::string trainable; // '1' or '0' for each parameter of the model

  const LedgerEntry* find(int64_t number) const;
};

// How long the host has been seen to wait in one place.
struct Silence {
  std::chrono::steady_clock::duration length{};
  int64_t number = -1; // of the collective
};

// A ring: nothing is allocated while training. Written by the thread that trains, which takes no
// lock and reads no clock for a collective; read by the watchdog, which may find a collective that
// is just being noted half written. Numbers count the collectives of a model over all its groups:
// every rank issues them in one order, so equal numbers are the same collective.
class Ledger {
 public:
  // `params`: names of the model's parameters.
  Ledger(std::string model, std::vector<std::string> params)
      : params(std::move(params)), model_(std::move(model)) {}

  // A collective is about to be issued; its number. `op` is a literal, `unit` outlives the ledger's
  // registration with the watchdog.
  int64_t begin(const char* op, const std::string& unit, int64_t nbytes);
  // The host waits in it from here on.
  void begin_wait(int64_t number);
  // Not any more; the collective itself may go on.
  void end_wait();
  // It was waited for.
  void finish(int64_t number);
  // This thread's call into the model, a literal; null for none.
  void set_call(const char* call) {
    call_.store(call, std::memory_order_relaxed);
  }

  // Whether the parameters from `first` on require grad on this rank.
  void set_trainable(size_t first, const std::vector<bool>& flags);
  LedgerState state() const;
  // For the watchdog: it counts from the first call that finds the host there.
  Silence silence();

  const std::vector<std::string> params;

 private:
  static constexpr size_t kKept = 256;
  static constexpr int64_t kTold = 32; // entries of a state
  struct Slot {
    std::atomic<const char*> op = nullptr;
    std::atomic<const std::string*> unit = nullptr;
    std::atomic<int64_t> nbytes = 0;
    std::atomic<bool> done = false;
  };

  const std::string model_;
  std::array<Slot, kKept> slots_;
  std::atomic<int64_t> next_ = 0;
  std::atomic<int64_t> waiting_ = -1;
  std::atomic<const char*> call_ = nullptr;
  mutable std::mutex mutex_;
  std::string trainable_; // under the mutex
  // Of the watchdog alone.
  int64_t seen_ = -1; // waited in
  std::chrono::steady_clock::time_point seen_since_;
};

} // namespace zerocore
