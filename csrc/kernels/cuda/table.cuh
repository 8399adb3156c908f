// A list of segments as a kernel's parameter, in as many launches as it needs.
//
// See Note [No table to keep]. A kernel may take 32,764 bytes of parameters (compute
// capability 7.0, CUDA 12.1 on), enough for kManySegments; kFewSegments spares short lists the
// copying of those.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdint>

#include "kernels/segment_list.h"

namespace zerocore::kernels::cuda {

constexpr int kFewSegments = 128;
constexpr int kManySegments = 1024;
constexpr int64_t kMaxChunks = INT32_MAX; // blocks of a launch

template <int capacity>
struct SegmentTable {
  int num_segments;
  // First and by itself: every block searches it, so it should lie in few cache lines.
  int32_t first_chunk[capacity];
  int64_t numel[capacity];
  void* dst[capacity];
  const void* src[capacity];
  uint32_t add[capacity / 32]; // one bit a segment
};
static_assert(sizeof(SegmentTable<kManySegments>) <= 32764 - 64, "room for other parameters");

// The work of one block.
struct BlockWork {
  void* dst;
  const void* src;
  Span span;
  bool add;
};

template <int capacity>
__device__ BlockWork block_work(const SegmentTable<capacity>& table) {
  const auto first_chunk = [&](int i) { return static_cast<int64_t>(table.first_chunk[i]); };
  const int64_t chunk = blockIdx.x;
  const int i = find_segment(first_chunk, table.num_segments, chunk);
  return {
      table.dst[i],
      table.src[i],
      chunk_span(table.numel[i], chunk - first_chunk(i)),
      (table.add[i / 32] >> (i % 32) & 1) != 0};
}

// Fills the table with the segments from `begin` on; returns the index behind the last one.
template <int capacity>
int fill_table(SegmentTable<capacity>& table, const SegmentList& list, int begin) {
  const int64_t first = list[begin].first_chunk;
  const int end = std::min(begin + capacity, list.size());
  int i = begin;
  for (; i < end; ++i) {
    const Segment& segment = list[i];
    const int64_t past = segment.first_chunk - first + num_chunks_of(segment.numel);
    TORCH_CHECK_VALUE(i > begin || past <= kMaxChunks, "a tensor is too large for one launch");
    if (past > kMaxChunks) {
      break;
    }
    const int row = i - begin;
    table.first_chunk[row] = static_cast<int32_t>(segment.first_chunk - first);
    table.numel[row] = segment.numel;
    table.dst[row] = segment.dst;
    table.src[row] = segment.src;
    if (row % 32 == 0) {
      table.add[row / 32] = 0;
    }
    table.add[row / 32] |= static_cast<uint32_t>(segment.add) << (row % 32);
  }
  table.num_segments = i - begin;
  return i;
}

// Calls launch(table, number of blocks, number of the first chunk) until all segments are done.
template <int capacity, typename Launch>
void launch_in_tables(const SegmentList& list, Launch launch) {
  for (int begin = 0; begin < list.size();) {
    SegmentTable<capacity> table; // the driver copies it while it launches
    const int64_t first = list[begin].first_chunk;
    begin = fill_table(table, list, begin);
    const int64_t end = begin < list.size() ? list[begin].first_chunk : list.num_chunks();
    launch(table, static_cast<unsigned>(end - first), first);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

template <typename Launch>
void launch_all(const SegmentList& list, Launch launch) {
  if (list.size() <= kFewSegments) {
    launch_in_tables<kFewSegments>(list, launch);
  } else {
    launch_in_tables<kManySegments>(list, launch);
  }
}

} // namespace zerocore::kernels::cuda
