// CRC-32 of zip files and of zlib: polynomial 0xEDB88320, reflected.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zerocore::io {

// The checksum of what came before, whose checksum is `crc` (0 for nothing), and of `nbytes` more.
// Any alignment; any thread.
uint32_t crc32(uint32_t crc, const void* data, size_t nbytes);

// The same without the processor's carry-less multiplication, which tests compare with.
uint32_t crc32_by_tables(uint32_t crc, const void* data, size_t nbytes);

// The checksum of two runs of bytes one after the other, from that of each.
uint32_t crc32_joined(uint32_t first, uint32_t second, uint64_t second_nbytes);

} // namespace zerocore::io
