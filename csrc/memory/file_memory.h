// Memory whose bytes are a file's: tensors over it may be larger than the memory of the machine.
//
// Note [Memory of a file]
// The whole file is mapped at one place, so tensors over it stay where they are and can be read and
// written at any time: pages come and go through the page cache, as the system sees fit. The
// methods below only say what is needed next and what is not needed soon; they change no byte.
//
// Note [A file without a name]
// The file's name is removed right after the file was made. So nothing is left on the disk however
// the process ends, SIGKILL included, and nobody can remove the file while it is in use. `df` shows
// its bytes, `du` does not. Its space is reserved at once: a full disk is an error then, and no
// SIGBUS later.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>
#include <string>

#include "common/types.h"
#include "io/system_calls.h"

namespace zerocore {

// Any thread, several at a time. Ranges are bytes of whole pages, labels say in errors what lies
// there. Errors are std::system_error, whose text names the file.
class FileMemory : public std::enable_shared_from_this<FileMemory> {
 public:
  // Reserves `nbytes` in `folder`, zeros at first. Throws ENOSPC, with the bytes wanted and free,
  // where they are not there.
  FileMemory(const std::string& folder, const std::string& name, int64_t nbytes);

  char* data() const { // null for a file of zero bytes
    return mapping_.data();
  }
  // As memory of tensors, which keeps the mapping.
  c10::DataPtr at(int64_t offset);

  // Reads the range, to be read or written. Throws where touching it would raise SIGBUS.
  void read(const Range& range, bool writes, const std::string& label) const;
  // Begins to write what has changed.
  void begin_write(const Range& range) const;
  // Writes what has changed, and takes no memory of the process for the range afterwards.
  void write(const Range& range, const std::string& label) const;
  // Takes no memory of the process for the range. Changed bytes are still to be written.
  void drop(const Range& range) const;

 private:
  int advise(const Range& range, int advice) const;
  [[noreturn]] void fail(int code, const char* verb, const std::string& label) const;

  std::string path_; // that the file was made under
  io::Descriptor file_;
  io::Mapping mapping_;
};

} // namespace zerocore
