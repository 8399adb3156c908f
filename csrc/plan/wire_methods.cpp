// How gathers and reductions go over the wire.
#include "plan/wire_methods.h"

#include <c10/util/Exception.h>

namespace zerocore {

int64_t GatherMethod::wire_nbytes(int64_t nbytes) const {
  switch (kind) {
    case Kind::AllGather:
    case Kind::Broadcasts:
    case Kind::Copies:
      return nbytes;
  }
  TORCH_INTERNAL_ASSERT(false);
}

int64_t ReduceMethod::wire_nbytes(int64_t nbytes) const {
  switch (kind) {
    case Kind::ReduceScatter:
    case Kind::Exchange:
      return nbytes;
  }
  TORCH_INTERNAL_ASSERT(false);
}

int64_t ReduceMethod::parts(int64_t num_ranks) const {
  switch (kind) {
    case Kind::ReduceScatter:
      return 1;
    case Kind::Exchange:
      return num_ranks;
  }
  TORCH_INTERNAL_ASSERT(false);
}

// A broadcast of each rank costs a turn of gloo's threads, and an all-reduce 2 (N - 1) of them one
// after the other: by four and three ranks an all-to-all's one turn costs less.
WireMethods WireMethods::of_backend(
    const std::string& name,
    int64_t num_ranks,
    bool sums_in_order) {
  constexpr int64_t kCopiedNbytes = 1 << 20;
  WireMethods methods;
  if (name == "gloo") {
    methods.gather = {GatherMethod::Kind::Broadcasts, num_ranks >= 4 ? kCopiedNbytes : 0};
    methods.reduce.kind = ReduceMethod::Kind::Exchange;
    methods.sums_in_parts = num_ranks >= 3;
  }
  if (sums_in_order) {
    methods.reduce.kind = ReduceMethod::Kind::Exchange;
  }
  return methods;
}

} // namespace zerocore
