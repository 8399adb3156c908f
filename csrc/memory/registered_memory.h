// Memory that a process group's backend allocates and registers with its communicator.
//
// Note [Registered memory]
// NCCL sends from registered memory without a copy to buffers of its own. A window is one
// allocation of c10d::Backend::allocateTensor(): NCCL takes it from a pool that is registered with
// the group's communicator, and with no other one. That is a local call, so ranks agree on nothing.
// Windows are few: the bucket pool's arena, all gathered parameters between steps, all kept
// gradients. The last two have places in their window before the first of them has memory; a window
// is freed with the last of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

namespace zerocore {

enum class Window : uint8_t { Arena, Parameters, Gradients };
inline constexpr size_t kNumWindows = 3;

struct RegisteredStats {
  std::string backend;
  bool is_offered = false;
  int64_t num_windows = 0; // that have memory now
  int64_t nbytes = 0; // of these
};

class RegisteredMemory {
 public:
  // Collective on a device: NCCL registers memory only with a communicator that is connected.
  RegisteredMemory(c10::intrusive_ptr<c10d::Backend> backend, c10::Device device);

  // Where it is false, only stats() may be called.
  bool is_offered() const {
    return is_offered_;
  }
  // All of a window, which has no memory now; not initialised, as is all memory from here.
  c10::DataPtr allocate(Window window, int64_t nbytes);
  // Gives the storage of `bytes` a place in a window that has no memory yet.
  void reserve(Window window, const at::Tensor& bytes);
  // Memory for the storage of `bytes`: at its place, or of the device's allocator if it has none.
  // It has no memory now.
  c10::DataPtr memory_for(const at::Tensor& bytes);

  RegisteredStats stats() const;

 private:
  struct Block {
    int64_t nbytes = 0;
    std::weak_ptr<c10::DataPtr> memory;
  };
  struct Place {
    Window window;
    int64_t begin;
  };

  c10::DataPtr part_of(Window window, int64_t begin);
  c10::DataPtr allocate(int64_t nbytes) const;

  c10::intrusive_ptr<c10d::Backend> backend_;
  c10::Device device_;
  bool is_offered_;
  std::array<Block, kNumWindows> windows_;
  std::unordered_map<const c10::StorageImpl*, Place> places_;
};

} // namespace zerocore
