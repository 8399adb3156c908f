// Finds the calls of units that a backward comes into by another way than their outputs.
//
// Note [Untracked backward]
// Hooks on a call's outputs say that its backward is about to run. Tensors leave a call in other
// ways, too: as an attribute, in a list, through a user's hook, inside of a plain object. Autograd
// numbers its nodes, so a call's nodes are a range, and a backward runs them from the last to the
// first: the first node of the range that runs is the moment to announce the call. It also shows
// that a unit was released too early, where the order that ranks share has left a call that this
// rank is in.
//
// That costs about 0.2 us a node, so the watch goes off with the first node of a call if a backward
// of the same shape has gone by without a side door: how many nodes each call recorded, how many
// were recorded after the calls, and which ones the backward begins with. It stays on where ranks
// differ. If a backward takes a side door all the same, the unit's storage raises an error: it is
// never read before it was waited for.
//
// Nodes of all backwards in the process are seen, on the threads that run them. Those that are not
// of a call on the model's device change nothing, see Note [The thread of a model's backward].
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/graph/autograd.h"
#include "plan/schedule.h"

namespace zerocore {

// Tells of every node of autograd before it runs in a backward, while it is on.
//
// Costs nothing while it is off, and about 0.2 us a node of any backward in the process while on.

class NodeWatch {
 public:
  // Called on the thread that runs the node, which may be of a backward of another model, while the
  // owner lives. It must not throw.
  using Seen = std::function<void(const GraphNode&)>;

  explicit NodeWatch(Seen seen) : watcher_(std::make_shared<Watcher>(std::move(seen))) {}
  ~NodeWatch();
  NodeWatch(const NodeWatch&) = delete;
  NodeWatch& operator=(const NodeWatch&) = delete;

  // Once, before it is on.
  void set_owner(std::weak_ptr<void> owner) {
    watcher_->owner = std::move(owner);
  }
  void set_on(bool on);
  bool is_on() const {
    return on_;
  }

  struct Watcher {
    Seen seen;
    std::weak_ptr<void> owner = {};
  };

 private:
  std::shared_ptr<Watcher> watcher_;
  bool on_ = false;
};

// One call of a unit as autograd recorded it: nodes number first to last - 1.
struct RecordedCall {
  CallHandle call;
  uint64_t first = 0;
  uint64_t last = 0;
  uint64_t thread = 0; // that recorded it: each numbers its nodes by itself
};

class UntrackedBackward {
 public:
  // `enter` announces a call's backward.
  using Enter = std::function<void(const RecordedCall&)>;

  // `is_usable` tells whether what the call's backward needs is there.
  UntrackedBackward(
      c10::Device device,
      Enter enter,
      std::function<bool(const CallHandle&)> is_usable)
      : device_(device),
        enter_(std::move(enter)),
        is_usable_(std::move(is_usable)),
        watch_([this](const GraphNode& node) { see(node); }) {}

  void set_owner(std::weak_ptr<void> owner) {
    watch_.set_owner(std::move(owner));
  }
  // A call has been left; returns its number. One that a checkpoint makes again in a backward is
  // known until that ends.
  int64_t add(const RecordedCall& call, bool recomputed);
  // The outermost call has been left: a backward may come.
  void expect_backward();
  // The first node of a backward that concerns the model runs.
  void begin_backward();
  // The shape of this backward says nothing.
  void keep_watching();
  // The call was announced.
  void announce(int64_t number);
  void end_backward();
  // Forgets the calls of passes before `oldest`.
  void forget(int64_t oldest_pass);
  void reset();

 private:
  struct Visit {
    RecordedCall recorded;
    bool recomputed = false;
    bool announced = false; // in this backward
  };

  void see(const GraphNode& node);
  std::vector<std::pair<int64_t, Visit>> visits_around(const GraphNode& node) const;

  c10::Device device_;
  Enter enter_;
  std::function<bool(const CallHandle&)> is_usable_;
  // In the order in which calls were left, so `last` grows in each thread. Changes under the mutex,
  // for which nobody waits long: other models' threads look here.
  std::deque<Visit> visits_;
  mutable std::mutex mutex_;
  int64_t first_visit_ = 0; // number of the first one that is kept
  std::vector<int64_t> announced_; // numbers
  uint64_t calls_ = 0; // shape of the calls since the last backward
  uint64_t shape_ = 0; // of the backward under way
  bool restarts_ = true; // the next call is the first one since the last backward
  bool in_backward_ = false;
  bool is_known_ = false; // `shape_` is
  bool found_ = false; // a side door, in this backward
  std::unordered_set<uint64_t> plain_; // shapes of backwards without side doors
  NodeWatch watch_;
};

} // namespace zerocore
