// The store of a process group, as a thread beside the program uses it.
#include "watch/store_connection.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <mutex>
#include <vector>

namespace zerocore {

namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using WeakStore = c10::weak_intrusive_ptr<c10d::Store>;

Store without_prefix(const Store& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return prefixed == nullptr ? store : prefixed->getUnderlyingNonPrefixStore();
}

// See Note [Names of hosts].
Store shared_clone(const Store& base) {
  struct Cloned {
    WeakStore base, clone;
  };
  static std::mutex mutex;
  static auto* const known = new std::vector<Cloned>(); // a thread may outlive the rest
  const std::lock_guard lock(mutex);
  std::erase_if(
      *known, [](const Cloned& each) { return each.base.expired() || each.clone.expired(); });
  for (const Cloned& each : *known) {
    if (each.base.lock() == base) {
      return each.clone.lock();
    }
  }
  Store clone = base->clone();
  known->push_back({WeakStore(base), WeakStore(clone)});
  return clone;
}

} // namespace

StoreConnection connect_beside(const Store& store) {
  const Store base = without_prefix(store);
  if (const auto* tcp = dynamic_cast<c10d::TCPStore*>(base.get())) {
    return {shared_clone(base), tcp->getHost() + ":" + std::to_string(tcp->getPort())};
  }
  const bool is_local = dynamic_cast<c10d::FileStore*>(base.get()) != nullptr ||
      dynamic_cast<c10d::HashStore*>(base.get()) != nullptr;
  return {is_local ? base : nullptr, ""};
}

} // namespace zerocore
