// Index arithmetic of segments and their chunks. Raw pointers only.
//
// Note [Chunks]
// A kernel works on any number of tensors in one launch. Every segment is cut into chunks of
// kChunkNumel elements (the last one may be shorter). The chunks of all segments have consecutive
// numbers, and each CUDA block takes one chunk. The cut depends on sizes alone, so sums of chunks
// have the same order in every call. Copies of bytes use chunks of kByteChunkNumel, so that a block
// moves as many bytes as with floats.
//
// Note [Rows]
// On one side of a copy a parameter's elements are contiguous. On the other side they are in
// separate runs, one for each rank. They form one segment of several runs, for any number of ranks;
// each run is cut into its own chunks.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "kernels/scaling.h"

namespace zerocore::kernels {

constexpr int64_t kChunkNumel = 8192;
constexpr int64_t kByteChunkNumel = kChunkNumel * static_cast<int64_t>(sizeof(float));
constexpr int64_t kVectorNbytes = 16; // the widest access of one thread

// dst[i] = or += src[i], for numel elements. Without a source, dst is zeroed.
struct Segment {
  void* dst = nullptr;
  const void* src = nullptr;
  int64_t numel = 0;
  bool add = false;
  // See Note [Rows]: elements of a run (the last one may be shorter; 0 for a single run), and bytes
  // between the starts of runs.
  int64_t run = 0;
  int64_t dst_step = 0;
  int64_t src_step = 0;
  int64_t first_chunk = 0; // number of its first chunk; the list sets it
};

ZEROCORE_HOST_DEVICE int64_t num_chunks_of(int64_t numel, int64_t chunk_numel = kChunkNumel) {
  return (numel + chunk_numel - 1) / chunk_numel;
}

// Returns the segment that holds `chunk`: the last non-empty one that starts at or before it.
// `first_chunk(i)` never decreases, and is 0 for the first segment.
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

// Returns the elements of chunk `index` of a segment.
ZEROCORE_HOST_DEVICE Range
chunk_span(int64_t numel, int64_t index, int64_t chunk_numel = kChunkNumel) {
  const int64_t begin = index * chunk_numel;
  return {begin, begin + chunk_numel < numel ? begin + chunk_numel : numel};
}

// A chunk's run, and the chunk's elements within the run.
struct RunSpan {
  int64_t run = 0;
  Range span;
};

// Returns the position of chunk `index` among `numel` elements in runs of `run`.
ZEROCORE_HOST_DEVICE RunSpan
run_span(int64_t numel, int64_t run, int64_t index, int64_t chunk_numel = kChunkNumel) {
  const int64_t run_chunks = num_chunks_of(run, chunk_numel);
  const int64_t number = index / run_chunks;
  const int64_t left = numel - number * run;
  return {number, chunk_span(left < run ? left : run, index % run_chunks, chunk_numel)};
}

template <typename AnySegment>
int64_t chunks_of(const AnySegment& segment, int64_t chunk_numel) {
  return num_chunks_of(segment.numel, chunk_numel);
}

inline int64_t chunks_of(const Segment& segment, int64_t chunk_numel) {
  if (segment.run == 0) {
    return num_chunks_of(segment.numel, chunk_numel);
  }
  return segment.numel / segment.run * num_chunks_of(segment.run, chunk_numel) +
      num_chunks_of(segment.numel % segment.run, chunk_numel);
}

// Calls visit(segment of one run) for each run of a segment.
template <typename Visit>
void for_each_run(const Segment& segment, Visit visit) {
  const int64_t numel = segment.run == 0 ? segment.numel : segment.run;
  int64_t number = 0;
  for (int64_t done = 0; done < segment.numel; done += numel, ++number) {
    const int64_t left = segment.numel - done;
    Segment run{static_cast<char*>(segment.dst) + number * segment.dst_step};
    if (segment.src != nullptr) {
      run.src = static_cast<const char*>(segment.src) + number * segment.src_step;
    }
    run.numel = left < numel ? left : numel;
    run.add = segment.add;
    visit(run);
  }
}

// Returns the elements of a group: as many of the wider type as one access holds. If the narrower
// type filled an access, the wider one would need two, and each of a warp's accesses would touch
// half of every 32-byte sector.
ZEROCORE_HOST_DEVICE constexpr int lanes_of(int itemsize, int other_itemsize) {
  return static_cast<int>(kVectorNbytes) / (itemsize > other_itemsize ? itemsize : other_itemsize);
}

// The cut of a run for wide accesses: `head` single elements until the destination is aligned,
// `num_vectors` groups of lanes_of() elements, then single ones again.
struct VectorSplit {
  int64_t head = 0;
  int64_t num_vectors = 0;
};

// Returns the split for addresses `dst` and `src`; without vectors if they are never aligned
// together.
ZEROCORE_HOST_DEVICE VectorSplit
split_vectors(uintptr_t dst, int dst_itemsize, uintptr_t src, int src_itemsize, int64_t numel) {
  const int64_t lanes = lanes_of(dst_itemsize, src_itemsize);
  const int64_t group = lanes * dst_itemsize;
  const int64_t past = static_cast<int64_t>(dst % group);
  const int64_t head = past == 0 ? 0 : (group - past) / dst_itemsize;
  const bool aligned =
      past % dst_itemsize == 0 && (src + head * src_itemsize) % (lanes * src_itemsize) == 0;
  if (!aligned || numel <= head) {
    return {numel, 0};
  }
  return {head, (numel - head) / lanes};
}

} // namespace zerocore::kernels
