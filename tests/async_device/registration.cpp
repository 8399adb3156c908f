// Keeps the registered windows by address.
#include "registration.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <utility>

#include "device.h"

namespace async_device {

namespace {

struct Window {
  int communicator;
  c10::DataPtr memory;
  size_t nbytes;
};

struct Registry {
  std::mutex mutex;
  int num_allocations = 0;
  std::string refusal;
  std::map<const char*, Window> windows; // by address
};

Registry& registry() {
  static auto& instance = *new Registry();
  return instance;
}

void deregister(void* data) {
  const std::lock_guard lock(registry().mutex);
  registry().windows.erase(static_cast<const char*>(data));
}

} // namespace

at::Tensor allocate_registered(int communicator, int64_t numel, const at::TensorOptions& options) {
  at::Tensor tensor = at::empty({numel}, options);
  const std::lock_guard lock(registry().mutex);
  TORCH_CHECK(registry().refusal.empty(), registry().refusal);
  ++registry().num_allocations;
  const c10::Storage& storage = tensor.storage();
  void* data = storage.mutable_data();
  c10::DataPtr memory = storage.set_data_ptr({data, data, &deregister, kDevice});
  registry().windows[static_cast<const char*>(data)] = {
      communicator, std::move(memory), storage.nbytes()};
  return tensor;
}

bool is_registered(int communicator, const at::Tensor& tensor) {
  const std::lock_guard lock(registry().mutex);
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  auto found = registry().windows.upper_bound(begin);
  if (found == registry().windows.begin()) {
    return false;
  }
  const auto& [address, window] = *--found;
  return window.communicator == communicator && begin + tensor.nbytes() <= address + window.nbytes;
}

Registrations registrations() {
  const std::lock_guard lock(registry().mutex);
  Registrations found{registry().num_allocations, static_cast<int>(registry().windows.size())};
  for (const auto& [address, window] : registry().windows) {
    found.nbytes += static_cast<int64_t>(window.nbytes);
  }
  return found;
}

void refuse_registration(const std::string& why) {
  const std::lock_guard lock(registry().mutex);
  registry().refusal = why;
}

} // namespace async_device
