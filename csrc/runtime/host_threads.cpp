// The thread's own number, as OpenMP keeps it.
#include "runtime/host_threads.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <omp.h>

namespace zerocore {

void use_host_threads(int num_threads) {
  TORCH_CHECK_VALUE(num_threads >= 1, "expected 1 thread or more, got ", num_threads);
  at::get_num_threads(); // the first call of a thread sets what torch would
  omp_set_num_threads(num_threads);
}

} // namespace zerocore
