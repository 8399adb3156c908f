// Packs blocks into an arena; integers only.
#pragma once

#include <cstdint>
#include <vector>

#include "common/bit_set.h"
#include "common/types.h"

namespace zerocore {

// The device's allocator aligns blocks to so many bytes, and so does the arena.
constexpr int64_t kBlockAlignment = 512;

// A block, which others name by its index. One of two blocks that were held at the same time has to
// name the other; a block of zero bytes is not there.
struct HeldBlock {
  int64_t nbytes = 0;
  int64_t first_use = 0; // grows with the time of it
  BitSet beside; // blocks that were held at the same time
};

struct Arrangement {
  std::vector<Range> places; // of each block, aligned; empty for a block of zero bytes
  int64_t nbytes = 0;
};

// Places in which no two blocks overlap that were held at the same time.
//
// Greedy (Pisarchyk and Lee 2020, arXiv:2001.03288): one block after the other, each at the lowest
// offset that is free of those it was held beside; once in the order of first use and once with
// the most bytes in and beside a block first. The better of the two.
Arrangement arrange(std::vector<HeldBlock> blocks);

} // namespace zerocore
