// One mapping that is split into blocks.
#include "io/block_ring.h"

#include <sys/mman.h>

#include <cerrno>
#include <string>

#include "io/system_calls.h"

namespace zerocore::io {

BlockRing::BlockRing(size_t num_blocks) : num_blocks_(num_blocks) {
  // One block more, as the first one begins on a multiple of its size.
  const size_t nbytes = (num_blocks + 1) * kBlockNbytes;
  void* found = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) {
    fail_with(
        errno, "cannot take " + std::to_string(nbytes) + " bytes of memory for blocks of a file");
  }
  mapping_ = static_cast<char*>(found);
#ifdef MADV_HUGEPAGE
  ::madvise(found, nbytes, MADV_HUGEPAGE);
#endif
}

BlockRing::~BlockRing() {
  ::munmap(mapping_, (num_blocks_ + 1) * kBlockNbytes);
}

std::vector<char*> BlockRing::blocks() const {
  const size_t rest = reinterpret_cast<uintptr_t>(mapping_) % kBlockNbytes;
  std::vector<char*> found;
  for (size_t i = num_blocks_; i > 0; --i) { // the first one is taken first
    found.push_back(mapping_ + (kBlockNbytes - rest) + (i - 1) * kBlockNbytes);
  }
  return found;
}

} // namespace zerocore::io
