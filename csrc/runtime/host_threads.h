// How many threads share the loops that a thread of this process runs.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <omp.h>

namespace zerocore {

// Of the calling thread alone: at::parallel_for, which the CPU's kernels use, gives its work to up
// to so many threads, this one included. Other threads keep theirs, also those that are started
// later; at::set_num_threads() would be the default of these.
inline void use_host_threads(int num_threads) {
  TORCH_CHECK_VALUE(num_threads >= 1, "expected 1 thread or more, got ", num_threads);
  at::get_num_threads(); // the first call of a thread sets what torch would
  omp_set_num_threads(num_threads);
}

} // namespace zerocore
