// Lists of segments with numbered chunks; each call builds its own list.
//
// Note [Tables by value]
// Gradients have other addresses in every backward, so each call writes a new table of pointers.
// This takes some nanoseconds per segment, and the table is on the stack up to kInlineSegments.
// CUDA kernels take it by value as their parameter. So there is no device memory, no copy to order
// before the launch, and no staging memory that a later call could overwrite too early.
#pragma once

#include <c10/util/SmallVector.h>

#include "kernels/adamw.h"
#include "kernels/segments.h"

namespace zerocore::kernels {

template <typename Segment, unsigned kInlineSegments>
class ChunkList {
 public:
  explicit ChunkList(int64_t chunk_numel = kChunkNumel) : chunk_numel_(chunk_numel) {}

  // Adds a segment and sets its first chunk. find_segment() skips empty segments, which have none.
  void push(Segment segment) {
    segment.first_chunk = num_chunks_;
    segments_.push_back(segment);
    num_chunks_ += chunks_of(segment, chunk_numel_);
  }

  int size() const {
    return static_cast<int>(segments_.size());
  }
  const Segment& operator[](int index) const {
    return segments_[index];
  }
  const Segment* begin() const {
    return segments_.begin();
  }
  const Segment* end() const {
    return segments_.end();
  }
  int64_t num_chunks() const {
    return num_chunks_;
  }
  int64_t chunk_numel() const {
    return chunk_numel_;
  }

 private:
  c10::SmallVector<Segment, kInlineSegments> segments_;
  int64_t chunk_numel_;
  int64_t num_chunks_ = 0;
};

using AdamWList = ChunkList<AdamWSegment, 32>;

class SegmentList : public ChunkList<Segment, 48> {
 public:
  using ChunkList::ChunkList;

  // Adds a segment unless it is empty. Destinations must not overlap.
  void push(const Segment& segment) {
    if (segment.numel > 0) {
      ChunkList::push(segment);
      has_runs_ = has_runs_ || segment.run > 0;
    }
  }
  bool has_runs() const {
    return has_runs_;
  }

 private:
  bool has_runs_ = false;
};

} // namespace zerocore::kernels
