// Reads memory of other processes on this machine.
#include "io/process_memory.h"

#ifdef __linux__
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <array>
#include <string>

#include "io/system_calls.h"

namespace zerocore::io {

#ifdef __linux__

void read_process(int64_t process, const std::vector<ForeignBytes>& pieces) {
  constexpr size_t kMostPieces = 256; // of a call
  std::array<iovec, kMostPieces> to, from;
  auto piece = pieces.begin();
  size_t done = 0; // bytes of it: a call may copy less than it is asked for
  while (piece != pieces.end()) {
    const size_t count = std::min<size_t>(kMostPieces, pieces.end() - piece);
    for (size_t i = 0; i < count; ++i) {
      const size_t skipped = i == 0 ? done : 0;
      const size_t nbytes = piece[i].nbytes - skipped;
      to[i] = {static_cast<char*>(piece[i].to) + skipped, nbytes};
      from[i] = {reinterpret_cast<void*>(piece[i].from + skipped), nbytes}; // NOLINT
    }
    const ssize_t copied = ::process_vm_readv(
        static_cast<pid_t>(process), to.data(), count, from.data(), count, /*flags=*/0);
    if (copied <= 0) {
      fail_with(
          copied == 0 ? EIO : errno, "cannot read memory of process " + std::to_string(process));
    }
    for (done += copied; piece != pieces.end() && done >= piece->nbytes; ++piece) {
      done -= piece->nbytes;
    }
  }
}

void admit_siblings() {
#ifdef PR_SET_PTRACER
  ::prctl(PR_SET_PTRACER, ::getppid(), 0, 0, 0); // fails where nobody wants to be told
#endif
}

#else

void read_process(int64_t process, const std::vector<ForeignBytes>&) {
  fail_with(ENOSYS, "cannot read memory of process " + std::to_string(process));
}

void admit_siblings() {}

#endif

} // namespace zerocore::io
