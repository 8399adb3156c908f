// How many threads share the loops that a thread of this process runs.
#pragma once

namespace zerocore {

// Of the calling thread alone: at::parallel_for, which the CPU's kernels use, gives its work to up
// to so many threads, this one included. Other threads keep theirs, also those that are started
// later; at::set_num_threads() would be the default of these.
void use_host_threads(int num_threads);

} // namespace zerocore
