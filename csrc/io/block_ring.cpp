// One mapping that is split into blocks.
#include "io/block_ring.h"

#include <cerrno>
#include <string>

namespace zerocore::io {

// One block more is mapped, as the first one begins on a multiple of its size.
BlockRing::BlockRing(size_t num_blocks)
    : num_blocks_(num_blocks), mapping_((num_blocks + 1) * kBlockNbytes) {
  if (mapping_.data() == nullptr) {
    fail_with(errno, "cannot take memory for " + std::to_string(num_blocks) + " blocks of a file");
  }
#ifdef MADV_HUGEPAGE
  ::madvise(mapping_.data(), (num_blocks + 1) * kBlockNbytes, MADV_HUGEPAGE);
#endif
}

std::vector<char*> BlockRing::blocks() const {
  const size_t rest = reinterpret_cast<uintptr_t>(mapping_.data()) % kBlockNbytes;
  std::vector<char*> found;
  for (size_t i = num_blocks_; i > 0; --i) { // the first one is taken first
    found.push_back(mapping_.data() + (kBlockNbytes - rest) + (i - 1) * kBlockNbytes);
  }
  return found;
}

} // namespace zerocore::io
