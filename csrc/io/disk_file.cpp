// Requests cut into blocks, and the file that they go to.
#include "io/disk_file.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace zerocore::io {

namespace {

constexpr int64_t kMaxBlockNbytes = int64_t{4} << 20;
constexpr size_t kMaxBlocks = 64; // under way at a time

// Makes the file and removes its name; `path` gets the name that it had.
int make_file(std::string& path) {
  path += ".XXXXXX";
  const int file = ::mkostemp(path.data(), O_CLOEXEC);
  if (file < 0) {
    fail_with(errno, "cannot make the file '" + path + "'");
  }
  ::unlink(path.c_str());
  return file;
}

// See Note [A file without a name]. Some systems fill the disk before they say that it is full, so
// they are asked first.
void reserve(int file, const std::string& folder, int64_t nbytes) {
  struct statvfs space{};
  const bool known = ::fstatvfs(file, &space) == 0;
  const auto free_nbytes = static_cast<int64_t>(space.f_bavail * space.f_frsize);
  if (known && free_nbytes < nbytes) {
    fail_with(
        ENOSPC,
        "folder '" + folder + "' has " + std::to_string(free_nbytes) + " bytes free, " +
            std::to_string(nbytes) + " are wanted");
  }
  const int code = nbytes > 0 ? ::posix_fallocate(file, 0, nbytes) : 0;
  if (code != 0) {
    fail_with(code, "cannot reserve " + std::to_string(nbytes) + " bytes in '" + folder + "'");
  }
}

bool is_aligned(int64_t value) {
  return value % kDiskAlignment == 0;
}

} // namespace

DiskFile::DiskFile(const std::string& folder, const std::string& name, int64_t nbytes)
    : path_(folder + "/" + name),
      nbytes_(nbytes),
      file_(make_file(path_)),
      traffic_(mutex_, kMaxBlocks, [this](Ticket ticket, const Block& rest, int error) {
        account(requests_.at(ticket), rest, error);
      }) {
  if (nbytes < 0 || !is_aligned(nbytes)) {
    throw std::invalid_argument(
        "the size of a disk file must be a multiple of " + std::to_string(kDiskAlignment) +
        " bytes, got " + std::to_string(nbytes));
  }
  reserve(file_, folder, nbytes);
  is_direct_ = set_direct(file_, true);
}

DiskFile::Ticket DiskFile::read(int64_t offset, void* data, int64_t nbytes, std::string label) {
  return begin({false, static_cast<char*>(data), offset, nbytes, std::move(label)});
}

DiskFile::Ticket DiskFile::write(
    int64_t offset,
    const void* data,
    int64_t nbytes,
    std::string label) {
  auto* bytes = static_cast<char*>(const_cast<void*>(data)); // read only: Block::writes
  return begin({true, bytes, offset, nbytes, std::move(label)});
}

DiskFile::Ticket DiskFile::begin(Request request) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(request.data));
  const bool is_inside =
      request.offset >= 0 && request.nbytes > 0 && request.offset <= nbytes_ - request.nbytes;
  if (!is_inside || !is_aligned(request.offset) || !is_aligned(request.nbytes) ||
      !is_aligned(address)) {
    throw std::invalid_argument(
        "'" + path_ + "' has " + std::to_string(nbytes_) +
        " bytes, and requests are of multiples of " + std::to_string(kDiskAlignment) +
        " within them; got " + std::to_string(request.nbytes) + " bytes at " +
        std::to_string(request.offset) + " with memory at " + std::to_string(address) + " for " +
        request.label);
  }
  const std::lock_guard lock(mutex_);
  const Ticket ticket = next_ticket_++;
  requests_.emplace(ticket, std::move(request));
  unfed_.push_back(ticket);
  feed();
  return ticket;
}

// Has as many blocks under way as may be.
void DiskFile::feed() {
  while (!unfed_.empty() && !traffic_.is_full()) {
    const Ticket ticket = unfed_.front();
    Request& request = requests_.at(ticket);
    if (request.begun_nbytes == request.nbytes || request.error != 0) {
      unfed_.pop_front();
      continue;
    }
    const int64_t begun = request.begun_nbytes;
    const int64_t size = std::min(request.nbytes - begun, kMaxBlockNbytes);
    traffic_.begin(
        ticket, {request.writes, file_, request.data + begun, request.offset + begun, size});
    request.begun_nbytes += size;
    ++request.num_blocks;
  }
}

void DiskFile::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  const auto found = requests_.find(ticket);
  if (found == requests_.end()) {
    throw std::invalid_argument(
        "'" + path_ + "': request " + std::to_string(ticket) + " was waited for, or never made");
  }
  while (!found->second.is_done()) {
    traffic_.wait_for_some(lock);
    feed();
  }
  const Request request = std::move(found->second);
  std::erase(unfed_, ticket);
  requests_.erase(found);
  if (request.error != 0) {
    const std::string verb = request.writes ? "write" : "read";
    fail_with(
        request.error,
        "cannot " + verb + " " + request.label + " at byte " +
            std::to_string(request.error_offset) + " of '" + path_ + "'");
  }
}

void DiskFile::account(Request& request, const Block& rest, int error) {
  if (error != 0 && request.error == 0) {
    request.error = error;
    request.error_offset = rest.offset;
  }
  --request.num_blocks;
}

} // namespace zerocore::io
