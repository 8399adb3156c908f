// Reads memory of other processes on this machine.
#include "io/process_memory.h"

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace zerocore::io {

int read_process(int64_t process, int64_t from, void* to, const std::vector<ProcessBytes>& pieces) {
  constexpr int64_t kMostPieces = 256; // of a call
  std::array<iovec, kMostPieces> here, there;
  auto piece = pieces.begin();
  int64_t done = 0; // bytes of it: a call may copy less than it is asked for
  while (piece != pieces.end()) {
    const int64_t count = std::min(kMostPieces, pieces.end() - piece);
    for (int64_t i = 0, skipped = done; i < count; ++i, skipped = 0) {
      const auto nbytes = static_cast<size_t>(piece[i].nbytes - skipped);
      here[i] = {static_cast<char*>(to) + piece[i].to + skipped, nbytes};
      there[i] = {reinterpret_cast<void*>(from + piece[i].from + skipped), nbytes}; // NOLINT
    }
    const ssize_t copied = ::process_vm_readv(
        static_cast<pid_t>(process), here.data(), count, there.data(), count, /*flags=*/0);
    if (copied <= 0) {
      return copied == 0 ? EIO : errno;
    }
    for (done += copied; piece != pieces.end() && done >= piece->nbytes; ++piece) {
      done -= piece->nbytes;
    }
  }
  return 0;
}

} // namespace zerocore::io
