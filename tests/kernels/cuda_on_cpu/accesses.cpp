// Counts sectors of memory that warps access, as a GPU joins the accesses of a warp's threads.
//
// GCC's sanitizer of addresses, in the form for operating systems, calls a function before each
// access of memory and leaves to others what it does: here it counts. Only kernels are compiled so.
#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>

#include "cuda_on_cpu.h"

namespace cuda_on_cpu {

namespace {

constexpr unsigned kWarp = 32;
constexpr uintptr_t kSectorNbytes = 32;
constexpr uintptr_t kWidestNbytes = 16; // of one thread's instruction

struct Instruction {
  uintptr_t place; // in the program
  unsigned block;
  unsigned thread_or_warp;
  auto operator<=>(const Instruction&) const = default;
};

uintptr_t watched_begin = 0;
uintptr_t watched_end = 0;
Traffic traffic;
std::map<Instruction, unsigned> runs; // of an instruction, by one thread
// By all threads of a warp, each for the nth time.
std::map<std::tuple<Instruction, unsigned>, std::set<uintptr_t>> sectors;

void note(uintptr_t place, uintptr_t address, uintptr_t nbytes) {
  if (address < watched_begin || address >= watched_end) {
    return;
  }
  const unsigned run = runs[{place, blockIdx.x, threadIdx.x}]++;
  auto& touched = sectors[{{place, blockIdx.x, threadIdx.x / kWarp}, run}];
  for (uintptr_t at = address / kSectorNbytes; at * kSectorNbytes < address + nbytes; ++at) {
    traffic.sector_nbytes += touched.insert(at).second ? long{kSectorNbytes} : 0;
  }
  traffic.nbytes += static_cast<long>(nbytes);
}

void note_range(uintptr_t place, uintptr_t address, uintptr_t nbytes) {
  for (uintptr_t done = 0; done < nbytes; done += kWidestNbytes) {
    note(place + done / kWidestNbytes, address + done, std::min(kWidestNbytes, nbytes - done));
  }
}

} // namespace

void watch(const void* begin, size_t nbytes) {
  watched_begin = reinterpret_cast<uintptr_t>(begin);
  watched_end = watched_begin + nbytes;
  traffic = {};
  runs.clear();
  sectors.clear();
}

Traffic watched() {
  return traffic;
}

} // namespace cuda_on_cpu

#define PLACE reinterpret_cast<uintptr_t>(__builtin_return_address(0))
#define HOOK(name, nbytes)                           \
  extern "C" void __asan_##name(uintptr_t address) { \
    cuda_on_cpu::note(PLACE, address, nbytes);       \
  }
#define HOOKS(nbytes) HOOK(load##nbytes##_noabort, nbytes) HOOK(store##nbytes##_noabort, nbytes)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

extern "C" {
void __asan_loadN_noabort(uintptr_t address, uintptr_t nbytes) {
  cuda_on_cpu::note_range(PLACE, address, nbytes);
}
void __asan_storeN_noabort(uintptr_t address, uintptr_t nbytes) {
  cuda_on_cpu::note_range(PLACE, address, nbytes);
}
void __asan_handle_no_return() {}
void __asan_before_dynamic_init(const char* /*module*/) {}
void __asan_after_dynamic_init() {}
}
