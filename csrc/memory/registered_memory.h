// Memory that a process group's backend allocates and registers with its communicator.
//
// Note [Registered memory]
// NCCL sends from registered memory without a copy to its own buffers. A window is one allocation
// of c10d::Backend::allocateTensor(). NCCL takes it from a pool that is registered with the group's
// communicator only. Ranks need no agreement. There are three windows: the bucket pool's arena, all
// gathered parameters between steps, all kept gradients. In the last two each tensor reserves its
// place before any of them has memory. A window is freed with its last part.
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
  int64_t num_windows = 0; // windows with memory
  int64_t nbytes = 0; // of these windows
};

class RegisteredMemory {
 public:
  // Collective on a device: it connects the communicator, because NCCL registers no memory before.
  RegisteredMemory(c10::intrusive_ptr<c10d::Backend> backend, c10::Device device);

  // Returns whether the backend registers memory. If not, call only stats().
  bool is_offered() const {
    return is_offered_;
  }
  // Allocates a whole window that has no memory. All memory from this class is uninitialised.
  c10::DataPtr allocate(Window window, int64_t nbytes);
  // Reserves a place for the storage of `bytes` in a window that has no memory yet.
  void reserve(Window window, const at::Tensor& bytes);
  // Returns memory for the storage of `bytes`, which has none: its reserved place, or without one
  // memory of the device's allocator.
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
