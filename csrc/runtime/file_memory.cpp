// The mapping of a file, and memory in its place.
#include "runtime/file_memory.h"

#include <cerrno>
#include <string>

#include "runtime/bucket.h"

namespace zerocore {

namespace {

[[noreturn]] void fail(const std::string& verb, const Range& range, const std::string& what) {
  io::fail_with(errno, "cannot " + verb + " " + std::to_string(range.size()) + " bytes of " + what);
}

} // namespace

FileMemory::FileMemory(int file, int64_t nbytes)
    : file_(io::duplicate(file)), mapping_(static_cast<size_t>(nbytes), MAP_SHARED, file_) {
  if (nbytes > 0 && data() == nullptr) {
    fail("map", {0, nbytes}, "a file");
  }
}

c10::DataPtr FileMemory::at(int64_t offset) {
  return kept_memory(shared_from_this(), data() + offset);
}

void FileMemory::bring(const Range& range) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  char* place = data() + range.begin;
  const auto size = static_cast<size_t>(range.size());
  if (::mmap(place, size, PROT_READ | PROT_WRITE, kFlags, -1, 0) == MAP_FAILED) {
    fail("take", range, "memory (is there a limit, ulimit -d?)");
  }
#ifdef __linux__ // advice; nothing depends on it
  ::madvise(place, size, MADV_HUGEPAGE);
  // A read that is under way must not end in pages that the child of a fork shares.
  ::madvise(place, size, MADV_DONTFORK);
#endif
}

void FileMemory::put_back(const Range& range) {
  char* place = data() + range.begin;
  const auto size = static_cast<size_t>(range.size());
  constexpr int kFlags = MAP_SHARED | MAP_FIXED;
  if (::mmap(place, size, PROT_READ | PROT_WRITE, kFlags, file_, range.begin) == MAP_FAILED) {
    fail("map", range, "a file");
  }
}

void FileMemory::store(const Range& range) {
  char* place = data() + range.begin;
  const auto size = static_cast<size_t>(range.size());
  if (size > 0 && ::msync(place, size, MS_SYNC) != 0) {
    fail("write", range, "a file");
  }
  ::madvise(place, size, MADV_DONTNEED);
#ifdef __linux__
  ::posix_fadvise(file_, range.begin, range.size(), POSIX_FADV_DONTNEED);
#endif
}

} // namespace zerocore
