// Reads memory of other processes on this machine.
#pragma once

#include <cstdint>
#include <vector>

namespace zerocore::io {

// Bytes of memory there, at least one, and where they go in memory here.
struct ProcessBytes {
  int64_t from = 0;
  int64_t to = 0;
  int64_t nbytes = 0;
};

// Copies pieces of the memory at `from` of another process to `to`. The errno where the system
// refuses, else 0: ESRCH for a process that has ended, EPERM, EFAULT for bytes that are not mapped
// there.
int read_process(int64_t process, int64_t from, void* to, const std::vector<ProcessBytes>& pieces);

} // namespace zerocore::io
