// What bytes of files and mappings are counted in.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace zerocore {

// A multiple of both the pages of memory and what direct transfers are made of.
inline int64_t page_nbytes() {
  constexpr int64_t kBlock = 4096;
  return std::max<int64_t>(kBlock, ::sysconf(_SC_PAGESIZE));
}

} // namespace zerocore
