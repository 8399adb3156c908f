// Memory that is registered with a communicator, and how much of it there is.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace async_device {

struct Registrations {
  int num_allocations = 0; // so far
  int num_windows = 0; // alive
  int64_t nbytes = 0; // of these
};

// Allocates from the device's allocator; registered until the tensor's storage frees the memory.
at::Tensor allocate_registered(int communicator, int64_t numel, const at::TensorOptions& options);
bool is_registered(int communicator, const at::Tensor& tensor);
Registrations registrations();
// Makes allocations fail with this text; an empty one ends that.
void refuse_registration(const std::string& why);

} // namespace async_device
