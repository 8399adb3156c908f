// Reads memory of other processes on this machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zerocore::io {

// Bytes of another process, at least one, and where they go in this one.
struct ForeignBytes {
  uint64_t from = 0; // an address there
  void* to = nullptr;
  size_t nbytes = 0;
};

// Copies the bytes. Throws std::system_error where the system refuses: ESRCH for a process that has
// ended, EPERM, EFAULT for bytes that are not mapped there, ENOSYS on other systems than Linux.
void read_process(int64_t process, const std::vector<ForeignBytes>& pieces);

// Lets other children of this process's launcher read its memory, where the system wants to be told
// (Yama).
void admit_siblings();

} // namespace zerocore::io
