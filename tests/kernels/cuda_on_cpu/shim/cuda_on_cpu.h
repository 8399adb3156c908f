// The part of CUDA that the kernels use, on a CPU.
//
// A block's threads are fibers of one thread. They run one after another, in an order of choice,
// until each waits at a barrier or a shuffle: what works in one order only is a missing barrier.
// An access outside of a buffer, or at an address that is not a multiple of its size, is left to
// the sanitizers. There are no data races to be seen here, and no speed.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() static_cast<void>(0)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace cuda_on_cpu {

struct Index {
  unsigned x = 0;
};

enum class Order { Ascending, Descending, Shuffled };

// Of all launches from now on.
void set_order(Order order, unsigned seed);
// Launches and blocks so far.
struct Counts {
  long launches = 0;
  long blocks = 0;
};
Counts counts();

// Runs `kernel` once for every thread of every block. Ends the process where a GPU would refuse
// the launch, or where threads of a block wait at different barriers.
void launch(int64_t num_blocks, int64_t num_threads, const std::function<void()>& kernel);

// Starts to count accesses within these bytes, by kernels that are compiled with build.TRACED.
void watch(const void* begin, size_t nbytes);
// Bytes that threads accessed, and those of all sectors of which each instruction of a warp
// accessed some: more where it left out parts of sectors.
struct Traffic {
  long nbytes = 0;
  long sector_nbytes = 0;
};
Traffic watched();

// Functions that threads call.
void wait_for_block();
double from_lane(double value, int distance); // that of the lane `distance` further in the warp

} // namespace cuda_on_cpu

extern cuda_on_cpu::Index threadIdx;
extern cuda_on_cpu::Index blockIdx;

inline void __syncthreads() {
  cuda_on_cpu::wait_for_block();
}

inline double __shfl_down_sync(unsigned /*mask*/, double value, int distance) {
  return cuda_on_cpu::from_lane(value, distance);
}

inline uint32_t __shfl_xor_sync(unsigned /*mask*/, uint32_t value, int lanes) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  return static_cast<uint32_t>(cuda_on_cpu::from_lane(value, (lane ^ lanes) - lane));
}

namespace c10::cuda {

inline int getCurrentCUDAStream(int /*device*/ = 0) {
  return 0;
}

struct CUDAGuard {
  template <typename Device>
  explicit CUDAGuard(const Device& /*device*/) {}
};

} // namespace c10::cuda
