// Small messages that all ranks of a gloo group combine, over its connections.
//
// See Note [Dissemination] in plan/dissemination.h. A message is one of fixed size for each hop,
// and a second one for what does not fit, so that no rank ever sends more than another has room
// for.
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

// One for a group, however many models use it, as their messages come in one order. One thread
// begins and awaits rounds. If a round has several hops, a thread of the link goes through them,
// which holds the group only while a round is under way.
class ControlLink : public std::enable_shared_from_this<ControlLink> {
 public:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  // One message of every rank.
  struct Round {
    explicit Round(Dissemination hops) : hops(std::move(hops)) {}

    Dissemination hops;
    std::vector<at::Tensor> heads; // that come, by hop
    Works receiving, sending;
    std::exception_ptr error;
    bool done = false;
  };
  using Ticket = std::shared_ptr<Round>;

  // That of the group. `is_alone`: nothing else issues collectives on it.
  static std::shared_ptr<ControlLink> of(
      const c10::intrusive_ptr<c10d::Backend>& backend,
      bool is_alone = false);

  // A new user's number, the same on all ranks.
  int64_t add_user() {
    return ++num_users_;
  }
  // Of collectives on the group, which lives as long as this.
  IssueGuard& guard() {
    return guard_;
  }
  // A backward begins on this thread, over as soon as nobody else holds `running`. Throws if one of
  // another thread is under way: no order of their rounds is the same on all ranks.
  void begin_backward(const std::shared_ptr<void>& running);
  // A round begins with this rank's message; whoever drops the ticket leaves it to the others.
  Ticket begin(ControlMessage own);
  // Blocks until this rank has heard all; throws what failed, and c10::DistBackendError if the
  // ranks' messages are not alike.
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
  const bool sums_; // heads, see Note [Gloo's loop]
  std::mutex mutex_; // of all that follows
  std::condition_variable changed_;
  std::deque<Ticket> rounds_; // not done, in order
  std::vector<std::pair<std::thread::id, std::weak_ptr<void>>> backwards_;
  bool has_thread_ = false;
  // Of the thread that begins.
  int64_t num_users_ = 0;
  bool connected_ = false;
  IssueGuard guard_{*this};
};

} // namespace zerocore
