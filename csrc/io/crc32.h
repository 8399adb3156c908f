// The CRC-32 of zip files and of zlib: polynomial 0xEDB88320, reflected.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zerocore::io {

// Returns the checksum of earlier bytes, whose checksum is `crc` (0 for none), and `nbytes` more.
// `data` has any alignment. Thread-safe.
uint32_t crc32(uint32_t crc, const void* data, size_t nbytes);

// crc32() without carry-less products, for tests to compare.
uint32_t crc32_by_tables(uint32_t crc, const void* data, size_t nbytes);

// Returns the checksum of two adjacent runs of bytes from the checksum of each.
uint32_t crc32_joined(uint32_t first, uint32_t second, uint64_t second_nbytes);

} // namespace zerocore::io
