// A flat buffer with a layout: one storage that slots are attached to, and views made once.
//
// Note [One storage, many slots]
// All tensors of a bucket share one StorageImpl. Attaching a slot is one pointer assignment,
// whatever the number of parameters, and moves no version counter; tensors that autograd saved
// share the storage and so read the bytes of the slot attached last. While nothing is attached,
// touching the data raises an error that names the owner instead of reading freed memory.
//
// Where bytes come and go while a program runs, leaves have a storage of their own: collectives
// write to the one, layers read the other, which raises until whoever waited for the bytes shows
// them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "plan/layout.h"

namespace zerocore {

// A leaf tensor over `storage` that is no view of another tensor: own version counter.
at::Tensor tensor_over(
    const c10::Storage& storage,
    c10::ScalarType dtype,
    int64_t offset_numel,
    at::IntArrayRef sizes,
    at::IntArrayRef strides);

// At least `nbytes`, not initialised. From the allocator that tensors come from at this moment: a
// CUDA program may have plugged in another one.
c10::DataPtr allocate_memory(c10::Device device, int64_t nbytes);
// Memory at `data` that lives as long as its owner, whom this keeps.
c10::DataPtr kept_memory(std::shared_ptr<void> owner, void* data, c10::Device device = c10::kCPU);
// Frees the memory of a tensor's storage: all its tensors raise `message` until they are given
// memory again, of the same size and not initialised.
void free_memory(const at::Tensor& tensor, const std::string& message);
void give_memory(const at::Tensor& tensor, c10::DataPtr data);

class Bucket {
 public:
  // Holds `regions` of `layout`, one after the other; `shard` is this rank's index. `owner` is
  // named in errors. With `hides` views cannot be read before show(). Allocates nothing.
  Bucket(
      const Layout& layout,
      std::vector<int> regions,
      int64_t shard,
      c10::Device device,
      std::string owner,
      bool hides = false);

  // The buffer reads and writes `data` (at least nbytes()) from now on.
  void attach(void* data);
  // As attach, and the bucket owns the memory.
  void attach(c10::DataPtr data);
  // The bytes that were attached are those that readers of views are to find.
  void show();
  // Forgets the memory; any access to it is an error until the next attach.
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
  // All of its memory, 1-D.
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
  // The same memory as bytes, for collectives that only move it.
  const at::Tensor& full_bytes(int region) const {
    return parts_.at(region).full_bytes;
  }
  const at::Tensor& own_bytes(int region) const {
    return parts_.at(region).own_bytes;
  }
  // A new leaf over the bucket with its own version counter; `offset` counts elements of the
  // region. Of a region that it does not hold, one of zeros with the memory of one element.
  at::Tensor view(int region, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) const;
  // The same, contiguous.
  at::Tensor view(int region, int64_t offset, at::IntArrayRef sizes) const;

 private:
  // A region of the layout; only its type is known if the bucket does not hold it.
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
  c10::Storage leaf_storage_; // the same one unless `hides_`
};

} // namespace zerocore
