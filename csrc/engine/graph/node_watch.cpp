// One callback of RecordFunction for all watches. It is removed while none is on: one that is only
// disabled costs every node of a backward, as torch looks at all that there are for each of them.
#include "engine/graph/node_watch.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace zerocore {

namespace {

// RecordFunction takes a plain function, so what it is to call is found here.
struct Watches {
  std::mutex mutex;
  std::vector<std::shared_ptr<NodeWatch::Watcher>> on;
  at::CallbackHandle callback = 0;
};

Watches& watches() {
  static Watches* const all = new Watches; // autograd's threads may outlive static objects
  return *all;
}

std::unique_ptr<at::ObserverContext> before_node(const at::RecordFunction& node) {
  std::vector<std::shared_ptr<NodeWatch::Watcher>> on;
  {
    const std::lock_guard<std::mutex> lock(watches().mutex);
    on = watches().on;
  }
  for (const auto& watcher : on) {
    if (const auto alive = watcher->owner.lock()) { // another thread may free the model
      watcher->seen({static_cast<uint64_t>(node.seqNr()), node.forwardThreadId()});
    }
  }
  return nullptr;
}

} // namespace

NodeWatch::~NodeWatch() {
  set_on(false);
}

void NodeWatch::set_on(bool on) {
  if (on_ == on) {
    return;
  }
  on_ = on;
  Watches& all = watches();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (!on) {
    all.on.erase(std::remove(all.on.begin(), all.on.end(), watcher_), all.on.end());
    if (all.on.empty()) {
      at::removeCallback(all.callback);
    }
    return;
  }
  all.on.push_back(watcher_);
  if (all.on.size() == 1) {
    all.callback = at::addGlobalCallback(
        at::RecordFunctionCallback(&before_node)
            .needsInputs(false)
            .scopes({at::RecordScope::BACKWARD_FUNCTION}));
  }
}

} // namespace zerocore
