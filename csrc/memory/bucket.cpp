// Makes tensors over shared storages, and attaches memory to storages.
#include "memory/bucket.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/strides.h>

#include <utility>

namespace zerocore {

namespace {

// Before torch 2.13 an access error cannot be removed from a storage. A detached storage is a null
// pointer there, and reading it crashes instead of raising an error.
template <typename Storage>
constexpr bool kHasAccessErrors =
    requires(Storage* storage) { storage->clear_data_ptr_access_error_msg_(); };

template <typename Storage>
void clear_access_error(Storage* storage) {
  if constexpr (kHasAccessErrors<Storage>) {
    storage->clear_data_ptr_access_error_msg_();
  }
}

template <typename Storage>
void set_access_error(Storage* storage, [[maybe_unused]] const std::string& message) {
  if constexpr (kHasAccessErrors<Storage>) {
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  }
}

c10::Storage make_storage(int64_t nbytes, c10::Device device) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(),
      static_cast<size_t>(nbytes),
      c10::DataPtr(nullptr, device),
      /*allocator=*/nullptr,
      /*resizable=*/false);
}

} // namespace

at::Tensor tensor_over(
    const c10::Storage& storage,
    c10::ScalarType dtype,
    int64_t offset_numel,
    at::IntArrayRef sizes,
    at::IntArrayRef strides) {
  const auto options = at::TensorOptions().dtype(dtype).device(storage.device());
  // empty() sets the right dispatch keys. InferenceMode must not apply to leaves.
  const c10::InferenceMode normal(false);
  at::Tensor tensor = at::empty({0}, options);
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset_numel);
  return tensor;
}

c10::DataPtr allocate_memory(c10::Device device, int64_t nbytes) {
  const c10::DeviceGuard guard(device);
  if (device.is_cpu()) {
    return c10::GetAllocator(device.type())->allocate(static_cast<size_t>(nbytes));
  }
  // On a GPU at::empty() allocates: c10 ignores an allocator that the program plugged in later.
  // Python modes, such as FakeTensorMode, must not intercept the allocation.
  const c10::impl::ExcludeDispatchKeyGuard below_modes(c10::python_ks);
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  return at::empty({nbytes}, options).storage().set_data_ptr(c10::DataPtr(nullptr, device));
}

c10::DataPtr kept_memory(std::shared_ptr<void> owner, void* data, c10::Device device) {
  using Owner = std::shared_ptr<void>;
  auto* kept = new Owner(std::move(owner));
  return {data, kept, [](void* dropped) { delete static_cast<Owner*>(dropped); }, device};
}

at::Tensor window_on(const at::Tensor& tensor) {
  auto owner = std::make_shared<c10::Storage>(tensor.storage());
  const auto nbytes = static_cast<int64_t>(tensor.nbytes());
  const c10::Storage window(
      c10::Storage::use_byte_size_t(),
      nbytes,
      kept_memory(std::move(owner), tensor.mutable_data_ptr(), tensor.device()),
      /*allocator=*/nullptr,
      /*resizable=*/false);
  return tensor_over(window, tensor.scalar_type(), 0, tensor.sizes(), tensor.strides());
}

void free_memory(const at::Tensor& tensor, const std::string& message) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
  set_access_error(storage, message);
}

void give_memory(const at::Tensor& tensor, c10::DataPtr data) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(std::move(data));
  clear_access_error(storage);
}

Bucket::Bucket(
    const Layout& layout,
    std::vector<int> regions,
    int64_t shard,
    c10::Device device,
    std::string owner,
    bool hides)
    : regions_(std::move(regions)),
      detached_message_(
          "the full parameters of " + owner +
          " were used while they are sharded. They exist only during the unit's own forward and "
          "backward; read them inside `with zerocore.unsharded(module):`, or mark the method that "
          "uses them with zerocore.register_forward_method"),
      device_(device),
      nbytes_(layout.nbytes_of(regions_)),
      hides_(hides),
      storage_(make_storage(nbytes_, device)),
      leaf_storage_(hides ? make_storage(nbytes_, device) : storage_) {
  for (const Region& region : layout.regions()) {
    parts_.push_back({static_cast<c10::ScalarType>(region.dtype)});
  }
  int64_t offset = 0;
  for (const int index : regions_) {
    const Region& region = layout.regions()[index];
    Part& part = parts_[index];
    offset = round_up(offset, kRegionAlignment);
    part.offset = offset;
    const int64_t own_offset = offset + region.shard_range(shard).begin * region.itemsize;
    part.full = flat(part.dtype, offset, region.numel());
    part.own = flat(part.dtype, own_offset, region.shard_numel);
    part.full_bytes = flat(c10::ScalarType::Byte, offset, region.nbytes());
    part.own_bytes = flat(c10::ScalarType::Byte, own_offset, region.shard_nbytes());
    offset += region.nbytes();
  }
  detach();
}

at::Tensor Bucket::flat(c10::ScalarType dtype, int64_t offset_nbytes, int64_t numel) const {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  return tensor_over(storage_, dtype, offset_nbytes / itemsize, {numel}, {1});
}

at::Tensor Bucket::view(int region, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides)
    const {
  const Part& part = parts_.at(region);
  if (!has(region)) {
    return at::zeros({1}, at::dtype(part.dtype).device(device_)).expand(sizes).detach();
  }
  const auto itemsize = static_cast<int64_t>(c10::elementSize(part.dtype));
  return tensor_over(leaf_storage_, part.dtype, part.offset / itemsize + offset, sizes, strides);
}

at::Tensor Bucket::view(int region, int64_t offset, at::IntArrayRef sizes) const {
  return view(region, offset, sizes, c10::contiguous_strides(sizes));
}

void Bucket::attach(void* data) {
  attach(c10::DataPtr(data, device_));
}

void Bucket::attach(c10::DataPtr data) {
  c10::StorageImpl* storage = storage_.unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(std::move(data));
  if (!hides_) {
    clear_access_error(storage);
  }
  attached_ = true;
}

void Bucket::show() {
  if (hides_) {
    c10::StorageImpl* leaves = leaf_storage_.unsafeGetStorageImpl();
    leaves->set_data_ptr_noswap(c10::DataPtr(storage_.mutable_data(), device_));
    clear_access_error(leaves);
  }
}

void Bucket::detach() {
  if (hides_) {
    storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, device_));
  }
  c10::StorageImpl* leaves = leaf_storage_.unsafeGetStorageImpl();
  leaves->set_data_ptr_noswap(c10::DataPtr(nullptr, device_));
  set_access_error(leaves, detached_message_);
  attached_ = false;
}

} // namespace zerocore
