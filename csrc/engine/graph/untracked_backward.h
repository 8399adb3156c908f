// Finds the calls of units that a backward enters without passing the call's outputs.
//
// Note [Untracked backward]
// Hooks on a call's outputs announce that its backward is about to run. But tensors may escape from
// a call in other ways: as an attribute, in a list, through a user's hook, inside a plain object.
// Autograd numbers its nodes, so the nodes of a call are a range, and a backward runs them from the
// last to the first. The first node of the range that runs therefore announces the call. The watch
// also detects that the ranks' shared order has resharded a unit which this rank's backward still
// needs.
//
// Watching costs about 0.2 us a node. So the first node of a call turns the watch off if a backward
// of the same shape found no untracked entry. A shape is the number of nodes of each call, the
// number of nodes after the calls, and the roots of the backward. The watch stays on while ranks
// differ. If a backward still enters a call unnoticed, the unit's storage raises an error, because
// it cannot be read before the wait for its all-gather.
//
// The watch sees the nodes of all backwards in the process, on the threads that run them. It
// ignores nodes outside of the calls, and nodes on another device than the model's, see Note [The
// thread of a model's backward].
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

// While on, reports every node of autograd before it runs in a backward. Costs nothing while off.
class NodeWatch {
 public:
  // Called on the thread that runs the node, while the owner lives. The node may belong to another
  // model's backward. Must not throw.
  using Seen = std::function<void(const GraphNode&)>;

  explicit NodeWatch(Seen seen) : watcher_(std::make_shared<Watcher>(std::move(seen))) {}
  ~NodeWatch();
  NodeWatch(const NodeWatch&) = delete;
  NodeWatch& operator=(const NodeWatch&) = delete;

  // Call it once, before set_on(true).
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

// One call of a unit as autograd recorded it: the nodes from number `first` to `last` - 1.
struct RecordedCall {
  CallHandle call;
  uint64_t first = 0;
  uint64_t last = 0;
  uint64_t thread = 0; // the recording thread; each thread has its own numbers
  bool of_backward = false; // the nodes are those of the call's backward, with create_graph=True
};

class UntrackedBackward {
 public:
  // Announces a call's backward.
  using Enter = std::function<void(const RecordedCall&)>;

  // `is_usable` returns whether the unit is unsharded, or the call's backward does not read it.
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
  // Adds a call that has ended, and returns its number. A recomputed call is forgotten when the
  // backward ends.
  int64_t add(const RecordedCall& call, bool recomputed);
  // Turns the watch on after the outermost call, because a backward may follow.
  void expect_backward();
  // Called before the first node of the model runs in a backward; decides whether to keep watching.
  void begin_backward();
  // Keeps the watch on in this backward, for any shape.
  void keep_watching();
  // Records that a hook has announced the call.
  void announce(int64_t number);
  void end_backward();
  // Forgets the calls of passes before `oldest_pass`.
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
  // Sorted by the end of the call, so `last` grows within each thread. The mutex guards it, because
  // the threads of other models' backwards read it.
  std::deque<Visit> visits_;
  mutable std::mutex mutex_;
  int64_t first_visit_ = 0; // number of the first call in visits_
  std::vector<int64_t> announced_; // numbers of calls announced in this backward
  uint64_t calls_ = 0; // hash of the calls since the last backward
  uint64_t shape_ = 0; // hash of the shape of the running backward
  bool restarts_ = true; // the next call is the first one since the last backward
  bool in_backward_ = false;
  bool is_known_ = false; // shape_ is valid
  bool found_ = false; // this backward had an untracked entry
  std::unordered_set<uint64_t> plain_; // shapes of backwards without untracked entries
  NodeWatch watch_;
};

} // namespace zerocore
