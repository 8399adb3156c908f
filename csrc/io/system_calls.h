// Errors of system calls, and reads and writes past the page cache.
#pragma once

#include <fcntl.h>

#include <string>
#include <system_error>

namespace zerocore::io {

[[noreturn]] inline void fail_with(int code, const std::string& what) {
  throw std::system_error(code, std::generic_category(), what);
}

// Whether the file now goes past the page cache (O_DIRECT), or through it, as asked.
inline bool set_direct([[maybe_unused]] int file, [[maybe_unused]] bool direct) {
#ifdef O_DIRECT
  return ::fcntl(file, F_SETFL, direct ? O_DIRECT : 0) == 0;
#else
  return !direct;
#endif
}

} // namespace zerocore::io
