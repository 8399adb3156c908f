// Memory that is mapped from a file: tensors over it may exceed the machine's memory.
//
// Note [Memory of a file]
// The whole file is mapped at one address, so tensors over it have a fixed address and can be read
// and written at any time: the system moves pages through its page cache. The methods below only
// tell the system which pages to load, write or drop; they change no byte.
//
// Note [A file without a name]
// FileMemory unlinks the file right after it creates it. So no file remains on the disk however the
// process ends, even by SIGKILL, and no other process can remove it. `df` counts its bytes, `du`
// does not. The space is reserved at once: a full disk is an error in the constructor, not a later
// SIGBUS.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>
#include <string>

#include "common/types.h"
#include "io/system_calls.h"

namespace zerocore {

// Thread-safe. Ranges are bytes of whole pages; errors use the label to name the content of a
// range. Errors are std::system_error, whose text names the file.
class FileMemory : public std::enable_shared_from_this<FileMemory> {
 public:
  // Reserves `nbytes` in `folder`, zeros at first. If the disk has too few, throws ENOSPC with the
  // needed and the free bytes.
  FileMemory(const std::string& folder, const std::string& name, int64_t nbytes);

  char* data() const { // null for a file of zero bytes
    return mapping_.data();
  }
  // Returns the bytes from `offset` on as memory for tensors, which keeps the mapping alive.
  c10::DataPtr at(int64_t offset);

  // Reads the range into memory; `writes` says that the caller will write to it. Throws the errors
  // that a plain access would raise as SIGBUS.
  void read(const Range& range, bool writes, const std::string& label) const;
  // Starts writing the range's changed pages to the disk.
  void begin_write(const Range& range) const;
  // Writes the range's changed pages to the disk, waits for that, and drops the range.
  void write(const Range& range, const std::string& label) const;
  // Drops the process's resident pages of the range. The system still writes changed pages later.
  void drop(const Range& range) const;

 private:
  int advise(const Range& range, int advice) const;
  [[noreturn]] void fail(int code, const char* verb, const std::string& label) const;

  std::string path_; // the name that the file had
  io::Descriptor file_;
  io::Mapping mapping_;
};

} // namespace zerocore
