// Index arithmetic of a list of segments that is cut into chunks of equal size. Raw pointers only.
//
// Note [Chunks]
// A kernel works on any number of tensors in one launch: every segment is cut into chunks of
// kChunkNumel elements (the last one may be shorter), the chunks of all segments are numbered
// through, and each CUDA block takes one chunk. The cut depends on sizes alone, so what is summed
// chunk by chunk is summed in the same order on every call.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace zerocore::kernels {

constexpr int64_t kChunkNumel = 8192;
constexpr int64_t kVectorNbytes = 16; // the widest access of one thread

// dst[i] = or += src[i], for numel elements. Without a source the destination is zeroed.
struct Segment {
  void* dst = nullptr;
  const void* src = nullptr;
  int64_t numel = 0;
  int64_t first_chunk = 0; // number of its first chunk in the list
  bool add = false;
};

// Elements [begin, end) of a segment.
struct Span {
  int64_t begin = 0;
  int64_t end = 0;
};

ZEROCORE_HOST_DEVICE int64_t num_chunks_of(int64_t numel) {
  return (numel + kChunkNumel - 1) / kChunkNumel;
}

// The segment that holds `chunk`: the last one that starts at or before it. `first_chunk(i)` grows
// with i and is 0 for the first segment; empty segments are not in the list.
template <typename FirstChunk>
ZEROCORE_HOST_DEVICE int find_segment(FirstChunk first_chunk, int num_segments, int64_t chunk) {
  int low = 0;
  int high = num_segments;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (first_chunk(middle) <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The elements of chunk `index` of a segment.
ZEROCORE_HOST_DEVICE Span chunk_span(int64_t numel, int64_t index) {
  const int64_t begin = index * kChunkNumel;
  return {begin, begin + kChunkNumel < numel ? begin + kChunkNumel : numel};
}

// How a run of elements is cut for wide accesses: `head` single elements until the destination is
// aligned, `num_vectors` groups of `lanes` elements, the rest single again.
struct VectorSplit {
  int64_t head = 0;
  int64_t num_vectors = 0;
};

// The split for addresses `dst` and `src`. No vectors where the two are never aligned together.
ZEROCORE_HOST_DEVICE VectorSplit
split_vectors(uintptr_t dst, int dst_itemsize, uintptr_t src, int src_itemsize, int64_t numel) {
  const int narrow = dst_itemsize < src_itemsize ? dst_itemsize : src_itemsize;
  const int64_t lanes = kVectorNbytes / narrow;
  const int64_t past = static_cast<int64_t>(dst % kVectorNbytes);
  const int64_t head = past == 0 ? 0 : (kVectorNbytes - past) / dst_itemsize;
  const bool aligned = past % dst_itemsize == 0 && (src + head * src_itemsize) % kVectorNbytes == 0;
  if (!aligned || numel <= head) {
    return {numel, 0};
  }
  return {head, (numel - head) / lanes};
}

} // namespace zerocore::kernels
