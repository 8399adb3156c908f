// Processor features for loops: clones by generation, float16 casts, prefetches and streaming
// stores.
#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

// Compiles a loop several times, once per generation of x86 processors; the loader picks one.
// Without clones a portable build uses 16-byte registers only, where casts of half types are three
// to ten times slower than memory. ThreadSanitizer builds have no clones: the loader picks before
// the sanitizer starts.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define ZEROCORE_CPU_CLONES \
  __attribute__((target_clones("arch=x86-64-v3", "arch=x86-64-v4", "default")))
#else
#define ZEROCORE_CPU_CLONES
#endif

namespace zerocore::kernels::cpu {

// Note [Casts of float16]
// x86 has cast float16 in hardware since 2012. Compilers do not use these casts for a loop over
// c10::Half, which casts by integer arithmetic. The loops below do. Each handles a multiple of the
// vector size and returns the number of elements done, or 0 on a processor without these casts. A
// plain loop does the rest and rounds in the same way.

// dst[i] = or += src[i] * factor, from or to float16; the other type is float16 or float32.
template <typename Dst, typename Src>
int64_t scale_halves(Dst* dst, const Src* src, int64_t numel, float factor, bool add);

// Adds the squares of src to `sum`.
int64_t square_halves(const c10::Half* src, int64_t numel, double& sum);

constexpr size_t kLineNbytes = 64; // of a cache line

// Prefetches `count` elements 8 KiB ahead of `values`. The processor itself prefetches only within
// a page.
template <int64_t count, typename T>
inline void fetch_ahead(const T* values) {
  constexpr size_t kAheadNbytes = 8192;
  const auto* bytes = reinterpret_cast<const char*>(values) + kAheadNbytes;
  for (size_t i = 0; i < count * sizeof(T); i += kLineNbytes) {
    __builtin_prefetch(bytes + i);
  }
}

// Note [Streaming stores]
// A store to an uncached line reads the line first, so a loop that fills a large buffer moves its
// bytes twice. A streaming store writes whole lines without reading them. It puts nothing into the
// cache for the next reader, so it pays only if a call writes more than a cache holds; libc's
// memcpy begins to stream at about the same size.

// Calls that write at least this many bytes stream: half of a common third-level cache.
constexpr int64_t kStreamedNbytes = int64_t{16} << 20;

// Copies bytes that do not overlap. Call end_stream() before another thread reads them.
inline void stream(void* dst, const void* src, size_t nbytes) {
#if defined(__x86_64__) && defined(__GNUC__)
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  const size_t past = reinterpret_cast<uintptr_t>(to) % kLineNbytes;
  const size_t head = std::min(nbytes, (kLineNbytes - past) % kLineNbytes);
  const size_t tail = nbytes - (nbytes - head) % kLineNbytes;
  std::memcpy(to, from, head);
  for (size_t i = head; i < tail; i += sizeof(__m128i)) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), values);
  }
  std::memcpy(to + tail, from + tail, nbytes - tail);
#else
  std::memcpy(dst, src, nbytes);
#endif
}

inline void end_stream() {
#if defined(__x86_64__) && defined(__GNUC__)
  _mm_sfence();
#endif
}

// Elements computed at a time, to stay in the first-level cache.
constexpr int64_t kBlockNumel = 1024;

// Calls write(values, begin, count), which writes up to kBlockNumel elements [begin, begin + count)
// to `values`, and streams them to `dst`.
template <typename T, typename Write>
void stream_blocks(T* dst, int64_t numel, const Write& write) {
  alignas(kLineNbytes) T values[kBlockNumel];
  int64_t begin = 0;
  while (begin < numel) {
    // A block ends at the end of a line, so all blocks but the first begin at a line.
    const auto past = reinterpret_cast<uintptr_t>(dst + begin) % kLineNbytes / sizeof(T);
    const int64_t count = std::min<int64_t>(numel - begin, kBlockNumel - past);
    write(static_cast<T*>(values), begin, count);
    stream(dst + begin, values, static_cast<size_t>(count) * sizeof(T));
    begin += count;
  }
}

} // namespace zerocore::kernels::cpu
