// Units of files and mappings.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace zerocore {

// Offsets, sizes and addresses of direct transfers are multiples of it, as O_DIRECT requires.
constexpr int64_t kDiskAlignment = 4096;

// A multiple of both the pages of memory and what direct transfers are made of.
inline int64_t page_nbytes() {
  return std::max<int64_t>(kDiskAlignment, ::sysconf(_SC_PAGESIZE));
}

} // namespace zerocore
