// A flat buffer with a layout: one storage, which points at a slot of memory, and permanent views.
//
// Note [One storage, many slots]
// All tensors of a bucket share one StorageImpl. Attaching a slot is one pointer assignment, for
// any number of parameters, and changes no version counter. Tensors that autograd saved share the
// storage, so they read the bytes of the slot attached last. While no slot is attached, accessing
// the data raises an error that names the owner instead of reading freed memory.
//
// A bucket with `hides` gives its leaves a second storage. Collectives write to the first, layers
// read the second. The second raises an error until show(), which follows the wait.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "plan/layout.h"

namespace zerocore {

// Returns a leaf tensor over `storage` with its own version counter; it is a view of no tensor.
at::Tensor tensor_over(
    const c10::Storage& storage,
    c10::ScalarType dtype,
    int64_t offset_numel,
    at::IntArrayRef sizes,
    at::IntArrayRef strides);

// Allocates at least `nbytes`, uninitialised, from the allocator that tensors use now: a CUDA
// program may have plugged in its own.
c10::DataPtr allocate_memory(c10::Device device, int64_t nbytes);
// Returns a pointer to `data` that keeps its `owner` alive.
c10::DataPtr kept_memory(std::shared_ptr<void> owner, void* data, c10::Device device = c10::kCPU);
// Returns a leaf tensor like `tensor` over its memory, with a storage of its own.
at::Tensor window_on(const at::Tensor& tensor);
// Frees the memory of a tensor's storage. From torch 2.13 on all tensors over the storage raise
// `message` until give_memory() gives it memory of the same size.
void free_memory(const at::Tensor& tensor, const std::string& message);
void give_memory(const at::Tensor& tensor, c10::DataPtr data);

class Bucket {
 public:
  // Holds `regions` of `layout`, one after the other; `shard` is this rank's index. Errors name
  // `owner`. With `hides`, views raise an error until show(). Allocates nothing.
  Bucket(
      const Layout& layout,
      std::vector<int> regions,
      int64_t shard,
      c10::Device device,
      std::string owner,
      bool hides = false);

  // Points the storage at `data`, at least nbytes() long, which the caller owns.
  void attach(void* data);
  // Attaches memory that the bucket owns.
  void attach(c10::DataPtr data);
  // Gives views access to the attached bytes; does nothing without `hides`.
  void show();
  // Drops the memory; any access is an error until the next attach.
  void detach();

  bool attached() const {
    return attached_;
  }
  int64_t nbytes() const {
    return nbytes_;
  }
  const std::vector<int>& regions() const {
    return regions_;
  }
  bool has(int region) const {
    return parts_.at(region).full.defined();
  }
  // Returns all of the bucket's memory, 1-D.
  at::Tensor bytes() const {
    return tensor_over(storage_, c10::ScalarType::Byte, 0, {nbytes_}, {1});
  }
  // 1-D, Region::numel() elements of the region's dtype.
  const at::Tensor& full(int region) const {
    return parts_.at(region).full;
  }
  // 1-D, this rank's Region::shard_numel elements.
  const at::Tensor& own(int region) const {
    return parts_.at(region).own;
  }
  // The same memory as bytes, for collectives that do no arithmetic.
  const at::Tensor& full_bytes(int region) const {
    return parts_.at(region).full_bytes;
  }
  const at::Tensor& own_bytes(int region) const {
    return parts_.at(region).own_bytes;
  }
  // Returns a new leaf over the bucket with its own version counter; `offset` counts elements of
  // the region. If the bucket does not hold the region, returns zeros in the memory of one element.
  at::Tensor view(int region, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) const;
  // Returns a contiguous view.
  at::Tensor view(int region, int64_t offset, at::IntArrayRef sizes) const;

 private:
  // A region of the layout; if the bucket does not hold it, only its dtype is set.
  struct Part {
    c10::ScalarType dtype;
    int64_t offset = 0; // bytes
    at::Tensor full = {}, own = {}, full_bytes = {}, own_bytes = {};
  };

  at::Tensor flat(c10::ScalarType dtype, int64_t offset_nbytes, int64_t numel) const;

  std::vector<int> regions_;
  std::vector<Part> parts_; // by region of the layout
  std::string detached_message_;
  c10::Device device_;
  int64_t nbytes_ = 0;
  bool attached_ = false;
  bool hides_;
  c10::Storage storage_;
  c10::Storage leaf_storage_; // storage_ itself without `hides`
};

} // namespace zerocore
