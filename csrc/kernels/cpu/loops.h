// The CPU's loops, and the distribution of their chunks over threads.
#pragma once

#include <ATen/Parallel.h>

#include "kernels/loops.h"

namespace zerocore::kernels::cpu {

void copy(const CopyCall& call);
void accumulate(const AccumulateCall& call);
void square(const SquareCall& call);
void total(const TotalCall& call);
void adamw(const AdamWCall& call);
void encode(const EncodeCall& call);
void decode(const DecodeCall& call);

// Calls run(chunk, its segment's index, its span) for each chunk, on several threads: one thread
// per `chunks_per_task` chunks at most.
template <typename List, typename Run>
void for_each_chunk(const List& list, int64_t chunks_per_task, const Run& run) {
  const auto first_chunk = [&](int i) { return list[i].first_chunk; };
  at::parallel_for(0, list.num_chunks(), chunks_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int index = find_segment(first_chunk, list.size(), chunk);
      run(chunk, index, chunk_span(list[index].numel, chunk - list[index].first_chunk));
    }
  });
}

} // namespace zerocore::kernels::cpu
