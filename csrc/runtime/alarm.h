// The alarm of one model: ranks that disagree get one error that names what each of them is in.
//
// Note [Alarm]
// A collective that the host waits in for too long, or that fails, is noticed by the watchdog. It
// writes what this rank's ledger holds to the group's store, which no collective can block; the
// watchdogs of the other ranks find that within a second, write theirs, and each rank makes the
// same sentence of all of them. Then it closes the groups' connections: what waits in one of their
// collectives ends with an error, nothing writes to their buffers any more, and the process can
// exit. From then on every use of the model throws that sentence.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/ledger.h"
#include "runtime/rank_report.h"

namespace zerocore {

struct AlarmOptions {
  std::string name; // of the model, the same on all its ranks and no other model's
  size_t rank = 0; // among all ranks of the model
  size_t size = 1;
  double stall_seconds = 60; // how long a collective may take
};

class Alarm {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // `groups` together reach all ranks; their backends of `device` are closed by the alarm.
  Alarm(
      AlarmOptions options,
      const std::vector<Group>& groups,
      c10::DeviceType device,
      std::vector<std::string> params);

  Ledger& ledger() {
    return ledger_;
  }

  // -- the threads that use the model
  bool is_raised() const {
    return raised_;
  }
  // Throws c10::DistBackendError if the alarm was raised.
  void check() const {
    if (raised_.load(std::memory_order_acquire)) {
      throw_message();
    }
  }
  // As work.wait(), but ends with the alarm at the latest: on gloo, whose works can be waited for
  // again. Others are ended by their backend's abort().
  void wait(c10d::Work& work) const;
  // A collective failed, or ranks were seen to disagree: raises the alarm and throws it.
  [[noreturn]] void fail(const std::string& what);

  // -- the watchdog
  // Raises the alarm if there is a reason here or on another rank; may take a few seconds.
  void tick();
  // Names the collective that the process waits in for this model; empty if it waits in none.
  std::string waits_in() const;
  // The program ends: `how` is for the others. Waits a moment for those that read an alarm.
  void note_end(const std::string& how);

 private:
  using Clock = std::chrono::steady_clock;

  [[noreturn]] void throw_message() const;
  bool has_reason();
  void raise();
  void publish();
  std::vector<RankReport> collect();
  std::string compare();
  void close_groups();

  const AlarmOptions options_;
  bool in_slices_ = false;
  const std::vector<std::string> params_;
  Ledger ledger_;
  c10::intrusive_ptr<c10d::Store> store_; // null: ranks cannot be compared
  // The watchdog must not be the last owner: a group's end joins threads.
  std::vector<c10::weak_intrusive_ptr<c10d::Backend>> backends_;

  std::atomic<bool> raised_ = false;
  std::atomic<bool> failed_ = false; // some collective did
  std::atomic<bool> comparing_ = false; // what fails from here on is a consequence
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::string message_; // written once, before raised_
  size_t num_answers_ = 0;
};

} // namespace zerocore
