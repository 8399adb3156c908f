// A block of threads as fibers.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_on_cpu.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#ifdef __x86_64__
// Leaves what a call preserves on this stack, its top in *from, and goes on at the top `to` of
// another one. As swapcontext without its two system calls, which took most of the checks' time.
extern "C" void cuda_on_cpu_switch(void*** from, void** to);
asm(R"(
.text
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_cpu_switch, . - cuda_on_cpu_switch
)");
#else
#include <ucontext.h>
#endif

cuda_on_cpu::Index threadIdx;
cuda_on_cpu::Index blockIdx;

namespace cuda_on_cpu {

namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kStackNbytes = size_t(128) << 10;

enum class State { Ready, InShuffle, AtBarrier, Done };

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s (block %u)\n", what, blockIdx.x);
  std::exit(2);
}

// A switch between stacks, told to AddressSanitizer.
class Stack {
 public:
  void switch_to(Stack& other) {
#ifdef __SANITIZE_ADDRESS__
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, other.bottom_, other.nbytes_);
    swap_with(other);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    swap_with(other);
#endif
  }
  // The first thing on a new stack; `from` is the one that switched to it.
  static void arrive([[maybe_unused]] Stack& from) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &from.bottom_, &from.nbytes_);
#endif
  }
  void begin(void (*entry)()) {
    if (memory_.empty()) {
      memory_.resize(kStackNbytes);
    }
    bottom_ = memory_.data();
    nbytes_ = memory_.size();
#ifdef __x86_64__
    const auto end = reinterpret_cast<uintptr_t>(memory_.data() + memory_.size()) & ~uintptr_t(15);
    // The words that cuda_on_cpu_switch pops: six registers and where to go; then no address to
    // return to.
    top_ = reinterpret_cast<void**>(end) - 8;
    std::fill_n(top_, 8, nullptr);
    top_[6] = reinterpret_cast<void*>(entry);
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = memory_.data();
    context_.uc_stack.ss_size = memory_.size();
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }

 private:
#ifdef __x86_64__
  void swap_with(Stack& other) {
    cuda_on_cpu_switch(&top_, other.top_);
  }
  void** top_ = nullptr;
#else
  void swap_with(Stack& other) {
    swapcontext(&context_, &other.context_);
  }
  ucontext_t context_ = {};
#endif
  std::vector<char> memory_;
  const void* bottom_ = nullptr;
  size_t nbytes_ = 0;
};

struct Thread {
  Stack stack;
  State state = State::Done;
  double shown[2] = {0, 0}; // to the other lanes, in every other shuffle
  unsigned num_shuffles = 0;
};

Stack scheduler;
std::vector<Thread> threads(kMaxThreads);
unsigned num_running = 0;
const std::function<void()>* running = nullptr;
Order order = Order::Ascending;
std::mt19937 shuffles;
Counts all;

void wait_in(State state) {
  const unsigned me = threadIdx.x;
  threads[me].state = state;
  threads[me].stack.switch_to(scheduler);
  threadIdx.x = me;
}

// A fiber stays for all kernels: begun once, it waits for the next one when it is done.
void run_thread() {
  Stack::arrive(scheduler);
  while (true) {
    (*running)();
    wait_in(State::Done);
  }
}

std::vector<unsigned> turns() {
  std::vector<unsigned> result(num_running);
  std::iota(result.begin(), result.end(), 0);
  if (order == Order::Descending) {
    std::reverse(result.begin(), result.end());
  } else if (order == Order::Shuffled) {
    std::shuffle(result.begin(), result.end(), shuffles);
  }
  return result;
}

bool all_are(State state, unsigned begin, unsigned end) {
  return std::all_of(&threads[begin], &threads[0] + end, [&](const Thread& thread) {
    return thread.state == state;
  });
}

void release(unsigned begin, unsigned end) {
  for (unsigned i = begin; i < end; ++i) {
    threads[i].state = State::Ready;
  }
}

// Lets go on who has waited for all others; false if nobody has.
bool release_some() {
  bool any = false;
  for (unsigned warp = 0; warp < num_running; warp += kWarp) {
    if (all_are(State::InShuffle, warp, warp + kWarp)) {
      release(warp, warp + kWarp);
      any = true;
    }
  }
  if (!any && all_are(State::AtBarrier, 0, num_running)) {
    release(0, num_running);
    any = true;
  }
  return any;
}

void run_block() {
  release(0, num_running);
  do {
    for (const unsigned i : turns()) {
      if (threads[i].state == State::Ready) {
        threadIdx.x = i;
        scheduler.switch_to(threads[i].stack);
      }
    }
  } while (release_some());
  if (!all_are(State::Done, 0, num_running)) {
    fail("threads wait at different barriers");
  }
}

} // namespace

void set_order(Order new_order, unsigned seed) {
  order = new_order;
  shuffles.seed(seed);
}

Counts counts() {
  return all;
}

void launch(int64_t num_blocks, int64_t num_threads, const std::function<void()>& kernel) {
  if (num_blocks < 1 || num_blocks > INT32_MAX || num_threads < 1 || num_threads > kMaxThreads ||
      num_threads % kWarp != 0) {
    fail("a launch with no such grid");
  }
  static unsigned num_begun = 0;
  for (; num_begun < num_threads; ++num_begun) {
    threads[num_begun].stack.begin(run_thread);
  }
  running = &kernel;
  num_running = static_cast<unsigned>(num_threads);
  ++all.launches;
  for (int64_t block = 0; block < num_blocks; ++block) {
    blockIdx.x = static_cast<unsigned>(block);
    ++all.blocks;
    run_block();
  }
}

void wait_for_block() {
  wait_in(State::AtBarrier);
}

double from_lane(double value, int distance) {
  const unsigned me = threadIdx.x;
  const unsigned slot = threads[me].num_shuffles++ % 2;
  threads[me].shown[slot] = value;
  wait_in(
      State::InShuffle); // until all lanes show theirs; they read before they show in this again
  const unsigned other = me + static_cast<unsigned>(distance);
  return other / kWarp == me / kWarp ? threads[other].shown[slot] : value;
}

} // namespace cuda_on_cpu
