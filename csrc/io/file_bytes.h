// Bytes of open files with their checksums: each block is summed while it is in the cache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zerocore::io {

// All throw std::system_error with the errno of the call that failed. No Python, any thread.

// Writes `nbytes` at byte `offset` and returns crc32(crc, data, nbytes). The disk begins with them
// at once, so that a later fsync finds little left.
uint32_t write_at(int file, const void* data, size_t nbytes, int64_t offset, uint32_t crc);

// Takes the room of the first `nbytes` of a new file at once, which then are zeros, where the file
// system can: writing them has less to do, and a disk that is full says so before.
void reserve(int file, int64_t nbytes);

// The checksum of `nbytes` of a file from `offset` on. Throws EIO if the file ends before.
uint32_t crc32_at(int file, int64_t offset, size_t nbytes);

} // namespace zerocore::io
