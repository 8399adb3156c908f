// A file of a fixed size that memory is swapped to and from, many requests at a time.
//
// Note [A file without a name]
// The file's name is removed right after the file was made, and its space is reserved only then. So
// nothing is left on the disk however the process ends, SIGKILL included, and nobody can remove the
// file while it is in use. `df` shows its bytes, `du` does not.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>

#include "common/pages.h"
#include "io/block_threads.h"
#include "io/system_calls.h"

namespace zerocore::io {

// Any thread, several at a time. Throws std::system_error with the errno of what failed, whose text
// names file, offset and the request's label; std::invalid_argument for requests that make no
// sense.
class DiskFile {
 public:
  using Ticket = int64_t;

  // Reserves `nbytes` in `folder`: past the page cache (O_DIRECT) where its file system has that.
  // Throws ENOSPC, with the bytes wanted and free, where they are not there.
  DiskFile(const std::string& folder, const std::string& name, int64_t nbytes);
  // Waits for what is under way.
  ~DiskFile() = default;

  // Begin a transfer of `nbytes` > 0 and return at once. The memory is the request's until wait().
  // Requests of the same bytes have no order: wait for the first one. Bytes that were never written
  // read as zeros. Of all requests the first 256 MiB are under way; the next call of any of
  // the three begins the rest.
  Ticket read(int64_t offset, void* data, int64_t nbytes, std::string label);
  Ticket write(int64_t offset, const void* data, int64_t nbytes, std::string label);
  // Once for each ticket. Throws what went wrong with the request.
  void wait(Ticket ticket);

  int64_t nbytes() const {
    return nbytes_;
  }
  const std::string& path() const { // that it was made under
    return path_;
  }
  bool is_direct() const {
    return is_direct_;
  }
  int descriptor() const {
    return file_;
  }

 private:
  struct Request {
    bool writes = false;
    char* data = nullptr;
    int64_t offset = 0;
    int64_t nbytes = 0;
    std::string label;
    int64_t begun_nbytes = 0; // handed to the threads
    int num_blocks = 0; // under way
    int error = 0; // errno of the first block that failed, which began at:
    int64_t error_offset = 0;

    bool is_done() const {
      return num_blocks == 0 && (begun_nbytes == nbytes || error != 0);
    }
  };
  Ticket begin(Request request);
  void feed();
  void account(Request& request, const Block& rest, int error);

  std::string path_;
  int64_t nbytes_;
  Descriptor file_;
  bool is_direct_ = false;

  std::mutex mutex_; // what follows
  std::map<Ticket, Request> requests_; // not waited for yet
  std::deque<Ticket> unfed_; // requests with blocks that are not under way
  Ticket next_ticket_ = 0;
  BlockThreads traffic_; // goes first: it waits for what is under way
};

} // namespace zerocore::io
