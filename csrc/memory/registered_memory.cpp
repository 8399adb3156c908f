// Allocates a window at the first request for one of its parts.
#include "memory/registered_memory.h"

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <utility>

#include "common/math.h"
#include "common/types.h"
#include "memory/bucket.h"

namespace zerocore {

namespace {

constexpr int64_t kAlignment = 512; // as device allocators align

} // namespace

RegisteredMemory::RegisteredMemory(c10::intrusive_ptr<c10d::Backend> backend, c10::Device device)
    : backend_(std::move(backend)),
      device_(device),
      is_offered_(backend_->supportsTensorAlloc(device.index())) {
  if (!device.is_cpu()) { // collective: also on a rank whose backend registers nothing
    std::vector<at::Tensor> one = {at::zeros({1}, at::TensorOptions().device(device))};
    backend_->allreduce(one)->wait();
  }
}

c10::DataPtr RegisteredMemory::allocate(Window window, int64_t nbytes) {
  windows_[static_cast<size_t>(window)].nbytes = nbytes;
  return part_of(window, 0);
}

void RegisteredMemory::reserve(Window window, const at::Tensor& bytes) {
  if (bytes.nbytes() > 0) {
    Block& block = windows_[static_cast<size_t>(window)];
    TORCH_INTERNAL_ASSERT(block.memory.expired());
    places_[bytes.storage().unsafeGetStorageImpl()] = {window, block.nbytes};
    block.nbytes += round_up(static_cast<int64_t>(bytes.nbytes()), kAlignment);
  }
}

c10::DataPtr RegisteredMemory::memory_for(const at::Tensor& bytes) {
  const c10::Storage& storage = bytes.storage();
  const auto found = places_.find(storage.unsafeGetStorageImpl());
  return found == places_.end()
      ? allocate_memory(bytes.device(), static_cast<int64_t>(storage.nbytes()))
      : part_of(found->second.window, found->second.begin);
}

c10::DataPtr RegisteredMemory::part_of(Window window, int64_t begin) {
  Block& block = windows_[static_cast<size_t>(window)];
  std::shared_ptr<c10::DataPtr> memory = block.memory.lock();
  if (memory == nullptr) {
    memory = std::make_shared<c10::DataPtr>(allocate(block.nbytes));
    block.memory = memory;
  }
  char* data = static_cast<char*>(memory->get()) + begin;
  return kept_memory(std::move(memory), data, device_);
}

// Python modes, such as FakeTensorMode, must not intercept the allocation.
c10::DataPtr RegisteredMemory::allocate(int64_t nbytes) const {
  const c10::DeviceGuard guard(device_);
  const c10::impl::ExcludeDispatchKeyGuard below_modes(c10::python_ks);
  const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
  try {
    const at::Tensor tensor = backend_->allocateTensor(nbytes, options);
    return tensor.storage().set_data_ptr(c10::DataPtr(nullptr, device_));
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(
        false,
        "registered=True: ",
        backend_->getBackendName(),
        " did not allocate and register ",
        nbytes,
        " bytes: ",
        message_of(error),
        ". Without registered=True, memory comes from the device's allocator");
  }
}

RegisteredStats RegisteredMemory::stats() const {
  RegisteredStats stats{backend_->getBackendName(), is_offered_};
  for (const Block& block : windows_) {
    if (!block.memory.expired()) {
      ++stats.num_windows;
      stats.nbytes += block.nbytes;
    }
  }
  return stats;
}

} // namespace zerocore
