// Memory that blocks of a file are in on their way from or to the disk.
//
// Note [Past the page cache]
// A block that is read into memory of large pages is a few requests of the disk; by way of the page
// cache, and into small pages, it is many, and the processor copies it once more. So bytes that are
// not in the cache are read past it (O_DIRECT). Bytes that are in the cache come from there. Large
// files are written past it, too: the cache would take as much new memory as the file has bytes,
// from what trains beside it.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "io/system_calls.h"

namespace zerocore::io {

enum class StreamWay : uint8_t { Any, Cached, Direct }; // Any: past the page cache where it is best

constexpr int64_t kBlockNbytes = int64_t{2} << 20; // a large page
// Bytes that are summed and copied at a time: they fit a core's cache.
constexpr int64_t kSumNbytes = int64_t{256} << 10;

// Memory of large pages, where the system has them, for blocks.
class BlockRing {
 public:
  // Takes memory once it is touched. One block more is mapped, as the first one begins on a
  // multiple of its size.
  explicit BlockRing(size_t num_blocks)
      : num_blocks_(num_blocks), mapping_((num_blocks + 1) * kBlockNbytes) {
    if (mapping_.data() == nullptr) {
      fail_with(
          errno, "cannot take memory for " + std::to_string(num_blocks) + " blocks of a file");
    }
    ::madvise(mapping_.data(), (num_blocks + 1) * kBlockNbytes, MADV_HUGEPAGE);
  }
  // Of kBlockNbytes; the last one is the first in memory, and taken first.
  std::vector<char*> blocks() const {
    const size_t rest = reinterpret_cast<uintptr_t>(mapping_.data()) % kBlockNbytes;
    std::vector<char*> found;
    for (size_t i = num_blocks_; i > 0; --i) {
      found.push_back(mapping_.data() + (kBlockNbytes - rest) + (i - 1) * kBlockNbytes);
    }
    return found;
  }

 private:
  size_t num_blocks_;
  Mapping mapping_;
};

} // namespace zerocore::io
