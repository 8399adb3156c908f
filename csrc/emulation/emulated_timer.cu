// Kernels that block a stream as long as a collective on the emulated link takes.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "emulation/device_timer.h"

namespace zerocore {

namespace {

// As many threads as a block of NCCL's kernels may have.
constexpr int kThreadsPerSm = 640;
constexpr unsigned int kNapNs = 100;

__device__ uint64_t global_ns() {
  uint64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Several streams may book the link at a time: the first one to swap in its end goes first.
__global__ void book_kernel(
    unsigned long long* link_free_at,
    uint64_t* deadline,
    unsigned long long duration_ns) {
  unsigned long long seen = *link_free_at;
  unsigned long long end = 0;
  unsigned long long expected = 0;
  do {
    expected = seen;
    const unsigned long long now = global_ns();
    end = (now > expected ? now : expected) + duration_ns;
    seen = atomicCAS(link_free_at, expected, end);
  } while (seen != expected);
  *deadline = end;
}

__global__ void hold_kernel(const uint64_t* deadline) {
  const uint64_t end = *deadline;
  while (global_ns() < end) {
    __nanosleep(kNapNs);
  }
}

void book(uint64_t* link_free_at, uint64_t* deadline, int64_t duration_ns) {
  static_assert(sizeof(uint64_t) == sizeof(unsigned long long));
  book_kernel<<<1, 1, 0, c10::cuda::getCurrentCUDAStream()>>>(
      reinterpret_cast<unsigned long long*>(link_free_at),
      deadline,
      static_cast<unsigned long long>(duration_ns));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void hold(const uint64_t* deadline, int sms) {
  const int blocks = sms == 0 ? 1 : sms;
  const int threads = sms == 0 ? 1 : kThreadsPerSm;
  hold_kernel<<<blocks, threads, 0, c10::cuda::getCurrentCUDAStream()>>>(deadline);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

constexpr DeviceTimer kTimer{&book, &hold};

[[maybe_unused]] const bool timer_registered = [] {
  device_timer() = &kTimer;
  return true;
}();

} // namespace

} // namespace zerocore
