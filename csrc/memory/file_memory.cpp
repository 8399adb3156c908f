// Reserves the file on the disk, and tells the system which pages to read, write or drop.
#include "memory/file_memory.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "memory/bucket.h"

namespace zerocore {

namespace {

#ifdef MADV_POPULATE_READ // since Linux 5.14; the running kernel may be older
constexpr int kRead = MADV_POPULATE_READ, kReadToWrite = MADV_POPULATE_WRITE;
#else
constexpr int kRead = MADV_WILLNEED, kReadToWrite = MADV_WILLNEED;
#endif

// Creates the file and unlinks it; sets `path` to the name that it had.
int make_file(std::string& path) {
  path += ".XXXXXX";
  const int file = ::mkostemp(path.data(), O_CLOEXEC);
  if (file < 0) {
    io::fail_with(errno, "cannot create the file '" + path + "'");
  }
  ::unlink(path.c_str());
  return file;
}

// Checks the free space first: some systems fill the disk before they report that it is full.
int reserve(int file, const std::string& folder, int64_t nbytes) {
  struct statvfs space{};
  const bool known = ::fstatvfs(file, &space) == 0;
  const auto free_nbytes = static_cast<int64_t>(space.f_bavail * space.f_frsize);
  if (known && free_nbytes < nbytes) {
    io::fail_with(
        ENOSPC,
        "folder '" + folder + "' has " + std::to_string(free_nbytes) + " bytes free, " +
            std::to_string(nbytes) + " are needed");
  }
  const int code = nbytes > 0 ? ::posix_fallocate(file, 0, nbytes) : 0;
  if (code != 0) {
    io::fail_with(code, "cannot reserve " + std::to_string(nbytes) + " bytes in '" + folder + "'");
  }
  return file;
}

} // namespace

FileMemory::FileMemory(const std::string& folder, const std::string& name, int64_t nbytes)
    : path_(folder + "/" + name),
      file_(make_file(path_)),
      mapping_(static_cast<size_t>(nbytes), MAP_SHARED, reserve(file_, folder, nbytes)) {
  if (nbytes > 0 && data() == nullptr) {
    fail(errno, "map", std::to_string(nbytes) + " bytes");
  }
}

void FileMemory::fail(int code, const char* verb, const std::string& label) const {
  io::fail_with(code, std::string("cannot ") + verb + " " + label + " of '" + path_ + "'");
}

c10::DataPtr FileMemory::at(int64_t offset) {
  return kept_memory(shared_from_this(), data() + offset);
}

int FileMemory::advise(const Range& range, int advice) const {
  return range.empty() ? 0
                       : ::madvise(data() + range.begin, static_cast<size_t>(range.size()), advice);
}

void FileMemory::read(const Range& range, bool writes, const std::string& label) const {
  if (advise(range, writes ? kReadToWrite : kRead) != 0 && errno != EINVAL) {
    fail(errno == EFAULT ? EIO : errno, "read", label);
  }
}

void FileMemory::begin_write(const Range& range) const {
#ifdef __linux__
  if (!range.empty()) { // 0 bytes stand for all bytes to the end of the file
    ::sync_file_range(file_, range.begin, range.size(), SYNC_FILE_RANGE_WRITE);
  }
#endif
}

void FileMemory::write(const Range& range, const std::string& label) const {
  if (range.empty()) {
    return;
  }
#ifdef __linux__
  constexpr auto kFlags =
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  const int code = ::sync_file_range(file_, range.begin, range.size(), kFlags);
#else
  const int code = ::msync(data() + range.begin, static_cast<size_t>(range.size()), MS_SYNC);
#endif
  if (code != 0) {
    fail(errno, "write", label);
  }
  drop(range);
}

void FileMemory::drop(const Range& range) const {
  advise(range, MADV_DONTNEED);
}

} // namespace zerocore
