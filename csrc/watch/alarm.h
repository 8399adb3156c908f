// The alarm of one model: ranks that disagree get one error that names what each of them is in.
//
// Note [Alarm]
// A collective that the host waits in for too long, or that fails, is noticed here, without asking
// anybody. Then a roll call gives all ranks one sentence. If the store does not answer in time the
// sentence is of what this rank knows. The alarm closes the connections of all groups that it
// knows: what waits in one of their collectives ends with an error, nothing writes to their buffers
// any more, and the process can exit. It also prints the sentence, as the thread that waits may not
// get to. From then on every use of the model throws it.
// Before, and whenever the silence has doubled, a rank that waits calls the roll, too: if it proves
// that the ranks wait for each other the alarm comes at once.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "watch/ledger.h"
#include "watch/roll_call.h"

namespace zerocore {

struct AlarmOptions {
  std::string name; // of the model, the same on all its ranks and no other's; ends with its class
  bool needs_all = true; // each of its collectives needs all its ranks
  size_t rank = 0; // among all ranks of the model
  size_t size = 1;
  std::optional<double>
      stall_seconds; // how long a collective may take; by default as its group says
};

class Alarm {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // The first of `groups` carries control messages; its store and its default for the limit count.
  Alarm(AlarmOptions options, const std::vector<Group>& groups, std::vector<std::string> params);

  Ledger& ledger() {
    return ledger_;
  }
  // The alarm closes its connections, too.
  void add_group(const Group& group);
  bool has_group(const std::string& name) const;

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
  // A collective failed, or ranks were seen to disagree: raises the alarm and throws it.
  [[noreturn]] void fail(const std::string& what);
  // Raises the alarm and goes on: the caller has an error that says more.
  void note_failure(const std::string& what);
  // A thread waits for other ranks in a collective that is not in the ledger; a token for leave().
  int64_t enter(std::string what);
  void leave(int64_t token);

  // -- the thread that watches, which must not block
  void tick();
  // -- the thread that talks to stores
  // True while a roll call is open.
  bool talk();
  // The program ends: `how` is for the others.
  void note_end(const std::string& how);

  // -- any thread
  // Names what the process waits in for this model, and the model; empty if it waits in nothing.
  std::string waits_in() const;
  // None of a model whose collectives some of its ranks share.
  std::optional<ModelPosition> position() const;
  std::chrono::milliseconds interval() const;

 private:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;
  struct Wait {
    std::string what;
    Clock::time_point since;
  };

  [[noreturn]] void throw_message() const;
  // Of collectives without a number: the first that is still waited in; empty if there is none.
  std::string waits_without_number() const;
  std::string model() const;
  RankReport report() const;
  std::string advice() const;
  std::string describe(const std::vector<RankReport>& reports, bool must_end) const;
  void raise_alone();
  void raise(std::string message);
  void close_groups();

  const AlarmOptions options_;
  const std::vector<std::string> params_;
  Seconds limit_{};
  bool limit_is_timeout_ = true; // the group's, at which its collectives fail
  Ledger ledger_;
  RollCall roll_call_; // of the thread that talks

  std::atomic<bool> raised_ = false;
  mutable std::mutex mutex_; // of all that follows
  std::condition_variable changed_;
  std::vector<std::string> group_names_;
  // The alarm's threads must not be the last owner: a group's end joins threads.
  std::vector<c10::weak_intrusive_ptr<c10d::Backend>> backends_;
  std::map<int64_t, Wait> waits_; // by token
  int64_t num_waits_ = 0;
  Seconds silence_{}; // as of the last tick
  Seconds next_call_{}; // at that silence
  std::optional<Clock::time_point> must_end_; // since then
  std::string cause_; // what failed here, if that was first
  bool in_call_ = false;
  std::string message_; // written once, before raised_
};

} // namespace zerocore
