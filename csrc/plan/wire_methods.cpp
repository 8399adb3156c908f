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
// after the other: with four ranks or more the one turn of an all-to-all costs less.
WireMethods WireMethods::of_backend(
    const std::string& name,
    int64_t num_ranks,
    bool sums_in_order) {
  constexpr int64_t kCopiedNbytes = 256 * 1024;
  WireMethods methods;
  if (name == "gloo") {
    const bool has_many = num_ranks >= 4;
    methods.gather = {GatherMethod::Kind::Broadcasts, has_many ? kCopiedNbytes : 0};
    methods.reduce.kind = ReduceMethod::Kind::Exchange;
    methods.sums_in_parts = has_many;
  }
  if (sums_in_order) {
    methods.reduce.kind = ReduceMethod::Kind::Exchange;
  }
  return methods;
}

} // namespace zerocore
