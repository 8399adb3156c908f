// Fetches memory ahead of a loop.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zerocore::kernels::cpu {

constexpr size_t kLineNbytes = 64; // of the caches

// Fetches what lies 8 KiB behind the next `count` elements. The processor by itself fetches ahead
// within a page only.
template <int64_t count, typename T>
inline void fetch_ahead(const T* values) {
  constexpr size_t kAheadNbytes = 8192;
  const auto* bytes = reinterpret_cast<const char*>(values) + kAheadNbytes;
  for (size_t i = 0; i < count * sizeof(T); i += kLineNbytes) {
    __builtin_prefetch(bytes + i);
  }
}

} // namespace zerocore::kernels::cpu
