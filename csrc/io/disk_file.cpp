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

#include "io/system_calls.h"

namespace zerocore::io {

namespace {

constexpr int64_t kMaxBlockNbytes = int64_t{4} << 20;
constexpr size_t kMaxBlocks = 64; // under way at a time
constexpr size_t kNumThreads = 8; // without io_uring

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

std::unique_ptr<BlockQueue> make_queue(DiskWay way) {
  if (way != DiskWay::Threads) {
    if (auto queue = make_uring_queue(kMaxBlocks)) {
      return queue;
    }
  }
  if (way == DiskWay::IoUring) {
    fail_with(EOPNOTSUPP, "this system has no io_uring, or does not allow it");
  }
  return make_thread_queue(kNumThreads);
}

bool is_aligned(int64_t value) {
  return value % kDiskAlignment == 0;
}

} // namespace

DiskFile::DiskFile(const std::string& folder, const std::string& name, int64_t nbytes, DiskWay way)
    : path_(folder + "/" + name), nbytes_(nbytes), queue_(make_queue(way)), blocks_(kMaxBlocks) {
  if (nbytes < 0 || !is_aligned(nbytes)) {
    throw std::invalid_argument(
        "the size of a disk file must be a multiple of " + std::to_string(kDiskAlignment) +
        " bytes, got " + std::to_string(nbytes));
  }
  for (uint32_t id = 0; id < kMaxBlocks; ++id) {
    free_ids_.push_back(id);
  }
  file_ = make_file(path_);
  try {
    reserve(file_, folder, nbytes);
  } catch (...) {
    ::close(file_);
    throw;
  }
  is_direct_ = set_direct(file_, true);
}

DiskFile::~DiskFile() {
  try {
    std::unique_lock lock(mutex_);
    unfed_.clear();
    while (free_ids_.size() < kMaxBlocks) {
      wait_for_some(lock);
    }
  } catch (...) { // NOLINT(bugprone-empty-catch): the queue is gone, and its blocks with it
  }
  queue_.reset();
  ::close(file_);
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

// Gives the queue as many blocks as it takes.
void DiskFile::feed() {
  while (!unfed_.empty() && !free_ids_.empty()) {
    const Ticket ticket = unfed_.front();
    Request& request = requests_.at(ticket);
    if (request.begun_nbytes == request.nbytes || request.error != 0) {
      unfed_.pop_front();
      continue;
    }
    const int64_t begun = request.begun_nbytes;
    const int64_t size = std::min(request.nbytes - begun, kMaxBlockNbytes);
    const uint32_t id = free_ids_.back();
    const Block block{
        id,
        request.writes,
        file_,
        request.data + begun,
        request.offset + begun,
        static_cast<uint32_t>(size)};
    queue_->submit(block);
    free_ids_.pop_back();
    blocks_[id] = {ticket, block};
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
    wait_for_some(lock);
  }
  const Request request = std::move(found->second);
  std::erase(unfed_, ticket);
  requests_.erase(found);
  if (request.error != 0) {
    fail(request);
  }
}

// One thread waits for the queue, without the lock, and does the accounts for all.
void DiskFile::wait_for_some(std::unique_lock<std::mutex>& lock) {
  if (waiting_) {
    changed_.wait(lock);
    return;
  }
  std::vector<MovedBlock> moved;
  waiting_ = true;
  lock.unlock();
  try {
    queue_->wait(moved);
  } catch (...) {
    lock.lock();
    waiting_ = false;
    changed_.notify_all();
    throw;
  }
  lock.lock();
  waiting_ = false;
  for (const MovedBlock& block : moved) {
    account(block);
  }
  feed();
  changed_.notify_all();
}

// A block that was moved in part goes on from there.
void DiskFile::account(const MovedBlock& moved) {
  BlockUnderWay& under_way = blocks_[moved.id];
  Block& block = under_way.block;
  // ECANCELED: the thread that had submitted it has ended.
  const bool again =
      moved.result == -EINTR || moved.result == -EAGAIN || moved.result == -ECANCELED;
  int64_t done = again ? 0 : std::max<int64_t>(moved.result, 0);
  done -= done < block.nbytes ? done % kDiskAlignment : 0;
  if (again || (done > 0 && done < block.nbytes)) {
    block.data += done;
    block.offset += done;
    block.nbytes -= static_cast<uint32_t>(done);
    queue_->submit(block);
    return;
  }
  Request& request = requests_.at(under_way.ticket);
  if (done == 0 && request.error == 0) {
    request.error = moved.result < 0 ? static_cast<int>(-moved.result) : ENODATA; // the file ends
    request.error_offset = block.offset;
  }
  --request.num_blocks;
  free_ids_.push_back(moved.id);
}

void DiskFile::fail(const Request& request) const {
  const std::string verb = request.writes ? "write" : "read";
  fail_with(
      request.error,
      "cannot " + verb + " " + request.label + " at byte " + std::to_string(request.error_offset) +
          " of '" + path_ + "'");
}

} // namespace zerocore::io
