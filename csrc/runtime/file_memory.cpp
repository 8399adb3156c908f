// The mapping of a file, and memory in its place.
#include "runtime/file_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

namespace zerocore {

namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::string bytes_of(const Range& range) {
  return std::to_string(range.size()) + " bytes";
}

} // namespace

FileMemory::FileMemory(int file, int64_t nbytes)
    : file_(::fcntl(file, F_DUPFD_CLOEXEC, 0)), nbytes_(nbytes) {
  if (file_ < 0) {
    fail("cannot keep a file open to map it");
  }
}

std::shared_ptr<FileMemory> FileMemory::map(int file, int64_t nbytes) {
  const std::shared_ptr<FileMemory> memory(new FileMemory(file, nbytes));
  if (nbytes > 0) {
    const auto size = static_cast<size_t>(nbytes);
    void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory->file_, 0);
    if (data == MAP_FAILED) {
      fail("cannot map " + bytes_of({0, nbytes}) + " of a file");
    }
    memory->data_ = static_cast<char*>(data);
  }
  return memory;
}

FileMemory::~FileMemory() {
  if (data_ != nullptr) {
    ::munmap(data_, static_cast<size_t>(nbytes_));
  }
  if (file_ >= 0) {
    ::close(file_);
  }
}

c10::DataPtr FileMemory::at(int64_t offset) {
  using Keep = std::shared_ptr<FileMemory>;
  auto* keep = new Keep(shared_from_this());
  return {data_ + offset, keep, [](void* kept) { delete static_cast<Keep*>(kept); }, c10::kCPU};
}

void FileMemory::bring(const Range& range) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  char* place = data_ + range.begin;
  const auto size = static_cast<size_t>(range.size());
  if (::mmap(place, size, PROT_READ | PROT_WRITE, kFlags, -1, 0) == MAP_FAILED) {
    fail("cannot take " + bytes_of(range) + " of memory (is there a limit, ulimit -d?)");
  }
#ifdef __linux__ // advice; nothing depends on it
  ::madvise(place, size, MADV_HUGEPAGE);
  // A read that is under way must not end in pages that the child of a fork shares.
  ::madvise(place, size, MADV_DONTFORK);
#endif
}

void FileMemory::put_back(const Range& range) {
  char* place = data_ + range.begin;
  const auto size = static_cast<size_t>(range.size());
  constexpr int kFlags = MAP_SHARED | MAP_FIXED;
  if (::mmap(place, size, PROT_READ | PROT_WRITE, kFlags, file_, range.begin) == MAP_FAILED) {
    fail("cannot map " + bytes_of(range) + " of a file");
  }
}

void FileMemory::store(const Range& range) {
  char* place = data_ + range.begin;
  const auto size = static_cast<size_t>(range.size());
  if (size > 0 && ::msync(place, size, MS_SYNC) != 0) {
    fail("cannot write " + bytes_of(range) + " of a file");
  }
  ::madvise(place, size, MADV_DONTNEED);
#ifdef __linux__
  ::posix_fadvise(file_, range.begin, range.size(), POSIX_FADV_DONTNEED);
#endif
}

} // namespace zerocore
