// System calls: errors, descriptors and mappings that their owner ends, and O_DIRECT.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <string>
#include <system_error>

namespace zerocore::io {

[[noreturn]] inline void fail_with(int code, const std::string& what) {
  throw std::system_error(code, std::generic_category(), what);
}

// An open file, which the destructor closes; a negative number: no file.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) {
      ::close(number_);
    }
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  operator int() const { // NOLINT(google-explicit-constructor): system calls take the number
    return number_;
  }

 private:
  int number_;
};

// Returns another descriptor of the same open file.
inline int duplicate(int file) {
  const int own = ::fcntl(file, F_DUPFD_CLOEXEC, 0);
  if (own < 0) {
    fail_with(errno, "cannot duplicate the descriptor of a file");
  }
  return own;
}

// Mapped memory. data() is null for zero bytes, or if the system refuses; errno then has the
// reason.
class Mapping {
 public:
  explicit Mapping(
      size_t nbytes,
      int flags = MAP_PRIVATE | MAP_ANONYMOUS,
      int file = -1,
      off_t offset = 0,
      int protection = PROT_READ | PROT_WRITE)
      : nbytes_(nbytes) {
    void* found = nbytes == 0 ? nullptr : ::mmap(nullptr, nbytes, protection, flags, file, offset);
    data_ = found == MAP_FAILED ? nullptr : static_cast<char*>(found);
  }
  ~Mapping() {
    if (data_ != nullptr) {
      ::munmap(data_, nbytes_);
    }
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data() const {
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t nbytes_;
};

// Makes reads and writes of the file go past the page cache (O_DIRECT), or through it. Returns
// false if the system refuses.
inline bool set_direct(int file, bool direct) {
  return ::fcntl(file, F_SETFL, direct ? O_DIRECT : 0) == 0;
}

} // namespace zerocore::io
