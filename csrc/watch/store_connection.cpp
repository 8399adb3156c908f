// The store of a process group, as a thread beside the program uses it.
#include "watch/store_connection.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <filesystem>
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

bool listens_at(int fd, uint16_t port) {
  int listens = 0;
  socklen_t size = sizeof(listens);
  if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) {
    return false;
  }
  sockaddr_storage address{};
  size = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) { // NOLINT
    return false;
  }
  // Both families of the network have the port in the same place.
  return (address.ss_family == AF_INET || address.ss_family == AF_INET6) &&
      ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port) == port; // NOLINT
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

bool serves(const Store& store) {
  const Store base = without_prefix(store);
  const auto* tcp = dynamic_cast<c10d::TCPStore*>(base.get());
  if (tcp == nullptr) {
    return false;
  }
  std::error_code error;
  const std::filesystem::directory_iterator open_files("/proc/self/fd", error);
  return std::any_of(begin(open_files), end(open_files), [&](const auto& file) {
    return listens_at(std::stoi(file.path().filename()), tcp->getPort());
  });
}

} // namespace zerocore
