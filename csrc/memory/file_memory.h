// Memory that is mapped from a file: tensors over it may be larger than the machine's memory.
//
// Note [Memory of a file]
// The whole file is mapped at one address, so tensors over it stay where they are and can be read
// and written at any time: the system moves pages through its page cache. The methods below only
// tell the system which pages are needed next and which are not; they change no byte.
//
// Note [A file without a name]
// FileMemory removes the file's name right after it makes the file. So no file is left on the disk
// however the process ends, SIGKILL included, and no other process can remove it. `df` shows its
// bytes, `du` does not. Its space is reserved at once: a full disk is an error here, and no SIGBUS
// later.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>
#include <string>

#include "common/types.h"
#include "io/system_calls.h"

namespace zerocore {

// Several threads may call it at a time. Ranges are bytes of whole pages; errors use the label to
// say what lies there. Errors are std::system_error, whose text names the file.
class FileMemory : public std::enable_shared_from_this<FileMemory> {
 public:
  // Reserves `nbytes` in `folder`, zeros at first. Throws ENOSPC, with the bytes wanted and free,
  // if the disk has too few.
  FileMemory(const std::string& folder, const std::string& name, int64_t nbytes);

  char* data() const { // null for a file of zero bytes
    return mapping_.data();
  }
  // Returns the bytes from `offset` on as memory for tensors, which keeps the mapping.
  c10::DataPtr at(int64_t offset);

  // Reads the range into memory; `writes` says that the caller will write to it. Throws where
  // touching it would raise SIGBUS.
  void read(const Range& range, bool writes, const std::string& label) const;
  // Starts writing the range's changed pages to the disk.
  void begin_write(const Range& range) const;
  // Writes the range's changed pages to the disk and waits; then drops the range.
  void write(const Range& range, const std::string& label) const;
  // Gives up the process's pages of the range. The system still writes changed pages later.
  void drop(const Range& range) const;

 private:
  int advise(const Range& range, int advice) const;
  [[noreturn]] void fail(int code, const char* verb, const std::string& label) const;

  std::string path_; // the name that the file had
  io::Descriptor file_;
  io::Mapping mapping_;
};

} // namespace zerocore
