// Small messages that all ranks of a gloo group combine, over its connections.
//
// See Note [Dissemination] in plan/dissemination.h. Each hop sends a message of fixed size, and a
// second one for words that do not fit. So no rank sends more than its receiver expects.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "plan/dissemination.h"
#include "watch/issue_guard.h"

namespace zerocore {

// The control messages of a group. All models of the group share the link, because their messages
// need one order. One thread begins rounds and waits for them. A thread of the link runs rounds of
// several hops; it keeps the group alive only during a round.
class ControlLink : public std::enable_shared_from_this<ControlLink> {
 public:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  // A round of messages, one from each rank.
  struct Round {
    explicit Round(Dissemination hops) : hops(std::move(hops)) {}

    Dissemination hops;
    std::vector<at::Tensor> heads; // received messages, by hop
    Works receiving, sending;
    std::exception_ptr error;
    bool done = false;
  };
  using Ticket = std::shared_ptr<Round>;

  // Returns the group's link. `is_alone`: the group carries no other collectives.
  static std::shared_ptr<ControlLink> of(
      const c10::intrusive_ptr<c10d::Backend>& backend,
      bool is_alone = false);
  // Returns the backend's link, or null if it has none.
  static std::shared_ptr<ControlLink> find(const c10d::Backend& backend);

  // Returns a number for a new channel, equal on all ranks.
  int64_t add_user() {
    return ++num_users_;
  }
  // Returns the guard of the group's collectives, which lives as long as the link.
  IssueGuard& guard() {
    return guard_;
  }
  // Records that a backward begins on this thread; it ends when its last owner drops `running`.
  // Throws if a backward of another thread runs: their rounds have no order that all ranks share.
  void begin_backward(const std::shared_ptr<void>& running);
  // Begins a round with this rank's message. Drop the ticket to ignore the other messages.
  Ticket begin(ControlMessage own);
  // Blocks until this rank has all messages. Throws the error of a failed hop, and
  // c10::DistBackendError if the ranks' messages differ in kind or size.
  ControlMessage wait(const Ticket& round);

 private:
  ControlLink(const c10::intrusive_ptr<c10d::Backend>& backend, bool is_alone);

  c10::intrusive_ptr<c10d::Backend> backend() const;
  void connect(c10d::Backend& backend) const;
  void post_heads(c10d::Backend& backend, Round& round) const;
  void send(c10d::Backend& backend, Round& round) const;
  static ControlMessage receive(c10d::Backend& backend, Round& round);
  void carry_out(Round& round) const;
  void run();

  const c10::weak_intrusive_ptr<c10d::Backend> backend_;
  const int64_t rank_, size_;
  const bool sums_; // an all-reduce exchanges heads, see Note [Gloo's loop]
  std::mutex mutex_; // guards all members below
  std::condition_variable changed_;
  std::deque<Ticket> rounds_; // unfinished rounds, in order
  std::vector<std::pair<std::thread::id, std::weak_ptr<void>>> backwards_;
  bool has_thread_ = false;
  // Only the thread that begins rounds uses this.
  int64_t num_users_ = 0;
  bool connected_ = false;
  IssueGuard guard_{*this};
};

} // namespace zerocore
