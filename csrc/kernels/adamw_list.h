// A list of AdamW's tensors with its chunks numbered through, built anew for each call.
#pragma once

#include <c10/util/SmallVector.h>

#include "kernels/adamw.h"
#include "kernels/segments.h"

namespace zerocore::kernels {

// See Note [No table to keep].
class AdamWList {
 public:
  static constexpr unsigned kInlineSegments = 32;

  // Sets the segment's first chunk. An empty tensor has none; find_segment() passes over it, and
  // only its step is counted.
  void push(AdamWSegment segment) {
    segment.first_chunk = num_chunks_;
    segments_.push_back(segment);
    num_chunks_ += num_chunks_of(segment.numel);
  }

  int size() const {
    return static_cast<int>(segments_.size());
  }
  const AdamWSegment& operator[](int index) const {
    return segments_[index];
  }
  int64_t num_chunks() const {
    return num_chunks_;
  }

 private:
  c10::SmallVector<AdamWSegment, kInlineSegments> segments_;
  int64_t num_chunks_ = 0;
};

} // namespace zerocore::kernels
