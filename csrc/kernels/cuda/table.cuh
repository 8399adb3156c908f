// Passes a list of segments as a kernel's parameter, in as many launches as needed.
//
// See Note [Tables by value]. A kernel may take 32,764 bytes of parameters (compute capability 7.0,
// CUDA 12.1 on), enough for kManySegments. Short lists use kFewSegments, to copy fewer bytes.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdint>

#include "kernels/segment_list.h"

namespace zerocore::kernels::cuda {

constexpr int kFewSegments = 128;
constexpr int kManySegments = 1024;
constexpr int kSegmentsOfRuns = 512;
constexpr int64_t kMaxChunks = INT32_MAX; // the most blocks of a launch

// The columns that all tables of segments share.
template <int capacity>
struct ChunkTable {
  static constexpr int kCapacity = capacity;

  int num_segments;
  int chunk_numel;
  // A separate array: every block searches it, so it should occupy few cache lines.
  int32_t first_chunk[capacity];
  int64_t numel[capacity];
};

// The chunk of one block.
struct BlockChunk {
  int segment;
  Range span;
};

template <int capacity>
__device__ BlockChunk block_chunk(const ChunkTable<capacity>& table, int64_t chunk_numel) {
  const auto first_chunk = [&](int i) { return static_cast<int64_t>(table.first_chunk[i]); };
  const int64_t chunk = blockIdx.x;
  const int i = find_segment(first_chunk, table.num_segments, chunk);
  return {i, chunk_span(table.numel[i], chunk - first_chunk(i), chunk_numel)};
}

template <int capacity>
struct SegmentTable : ChunkTable<capacity> {
  void* dst[capacity];
  const void* src[capacity];
  uint32_t add[capacity / 32]; // one bit a segment

  void set(int row, const Segment& segment) {
    dst[row] = segment.dst;
    src[row] = segment.src;
    if (row % 32 == 0) {
      add[row / 32] = 0;
    }
    add[row / 32] |= static_cast<uint32_t>(segment.add) << (row % 32);
  }
};
static_assert(sizeof(SegmentTable<kManySegments>) <= 32764 - 64, "room for other parameters");

// A SegmentTable for segments of several runs, see Note [Rows].
template <int capacity>
struct RunTable : SegmentTable<capacity> {
  int64_t run[capacity];
  int64_t dst_step[capacity];
  int64_t src_step[capacity];

  void set(int row, const Segment& segment) {
    SegmentTable<capacity>::set(row, segment);
    run[row] = segment.run > 0 ? segment.run : segment.numel;
    dst_step[row] = segment.dst_step;
    src_step[row] = segment.src_step;
  }
};
static_assert(sizeof(RunTable<kSegmentsOfRuns>) <= 32764 - 64, "room for other parameters");

// The work of one block.
struct BlockWork {
  void* dst;
  const void* src;
  Range span;
  bool add;
};

template <int capacity>
__device__ BlockWork block_work(const SegmentTable<capacity>& table) {
  const auto [i, span] = block_chunk(table, table.chunk_numel);
  return {table.dst[i], table.src[i], span, (table.add[i / 32] >> (i % 32) & 1) != 0};
}

template <int capacity>
__device__ BlockWork block_work(const RunTable<capacity>& table) {
  const auto first_chunk = [&](int i) { return static_cast<int64_t>(table.first_chunk[i]); };
  const int64_t chunk = blockIdx.x;
  const int i = find_segment(first_chunk, table.num_segments, chunk);
  const auto [run, span] =
      run_span(table.numel[i], table.run[i], chunk - first_chunk(i), table.chunk_numel);
  const auto* src = static_cast<const char*>(table.src[i]);
  return {
      static_cast<char*>(table.dst[i]) + run * table.dst_step[i],
      src == nullptr ? nullptr : src + run * table.src_step[i],
      span,
      (table.add[i / 32] >> (i % 32) & 1) != 0};
}

// Fills the table with the segments from `begin` on; returns the index after the last one.
template <typename Table, typename List>
int fill_table(Table& table, const List& list, int begin) {
  const int64_t first = list[begin].first_chunk;
  const int end = std::min(begin + Table::kCapacity, list.size());
  int i = begin;
  for (; i < end; ++i) {
    const auto& segment = list[i];
    const int64_t past = segment.first_chunk - first + chunks_of(segment, list.chunk_numel());
    TORCH_CHECK_VALUE(i > begin || past <= kMaxChunks, "a tensor is too large for one launch");
    if (past > kMaxChunks) {
      break;
    }
    const int row = i - begin;
    table.first_chunk[row] = static_cast<int32_t>(segment.first_chunk - first);
    table.numel[row] = segment.numel;
    table.set(row, segment);
  }
  table.num_segments = i - begin;
  table.chunk_numel = static_cast<int>(list.chunk_numel());
  return i;
}

// Calls launch(table, number of blocks, index of its first segment) until all segments are done.
template <typename Table, typename List, typename Launch>
void launch_in_tables(const List& list, Launch launch) {
  for (int begin = 0; begin < list.size();) {
    Table table; // the driver copies it while it launches
    const int next = fill_table(table, list, begin);
    const int64_t end = next < list.size() ? list[next].first_chunk : list.num_chunks();
    launch(table, static_cast<unsigned>(end - list[begin].first_chunk), begin);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    begin = next;
  }
}

template <typename Launch>
void launch_all(const SegmentList& list, Launch launch) {
  TORCH_INTERNAL_ASSERT(!list.has_runs());
  if (list.size() <= kFewSegments) {
    launch_in_tables<SegmentTable<kFewSegments>>(list, launch);
  } else {
    launch_in_tables<SegmentTable<kManySegments>>(list, launch);
  }
}

template <typename Launch>
void launch_runs(const SegmentList& list, Launch launch) {
  if (list.has_runs()) {
    launch_in_tables<RunTable<kSegmentsOfRuns>>(list, launch);
  } else {
    launch_all(list, launch);
  }
}

} // namespace zerocore::kernels::cuda
