// Memory whose bytes are a file's, of which parts are brought in to be worked on.
//
// Note [Memory of a file]
// The whole file is mapped at one place, so tensors over it stay where they are and can be read and
// written at any time: what is touched comes and goes through the page cache, as the system sees
// fit. Bytes that are worked on are brought in: memory of this process takes the place of their
// mapping, and direct reads fill it, many at a time. When direct writes have stored it, the
// mapping takes the place back, and the memory is free. The kernel keeps both in step: a direct
// read first stores what was changed in the page cache, a direct write drops what that has of its
// bytes. The caller sees to it that no other code touches bytes that are brought in.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>

#include "common/types.h"
#include "io/system_calls.h"

namespace zerocore {

class FileMemory : public std::enable_shared_from_this<FileMemory> {
 public:
  // Maps an open file of `nbytes`, which may be closed afterwards. Throws std::system_error.
  FileMemory(int file, int64_t nbytes);

  char* data() const { // null for a file of zero bytes
    return mapping_.data();
  }
  // As memory of tensors, which keeps the mapping.
  c10::DataPtr at(int64_t offset);

  // Ranges are bytes of whole pages. Memory of zeros takes their place; throws std::system_error if
  // there is none.
  void bring(const Range& range);
  // The file's bytes are there again.
  void put_back(const Range& range);
  // Bytes that were written through the mapping are in the file, and take no memory. Throws
  // std::system_error when the disk fails.
  void store(const Range& range);

 private:
  io::Descriptor file_;
  io::Mapping mapping_;
};

} // namespace zerocore
