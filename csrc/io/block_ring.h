// Memory that blocks of a file are in on their way from or to the disk.
//
// Note [Past the page cache]
// A block that is read into memory of large pages is a few requests of the disk; by way of the page
// cache, and into small pages, it is many, and the processor copies it once more. So bytes that are
// not in the cache are read past it (O_DIRECT). Bytes that are in the cache come from there. Large
// files are written past it, too: the cache would take as much new memory as the file has bytes,
// from what trains beside it.
#pragma once

#include <cstddef>
#include <cstdint>
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
  explicit BlockRing(size_t num_blocks); // takes memory once it is touched
  std::vector<char*> blocks() const; // of kBlockNbytes

 private:
  size_t num_blocks_;
  Mapping mapping_;
};

} // namespace zerocore::io
