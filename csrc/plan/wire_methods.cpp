// How gathers and reductions go over the wire.
#include "plan/wire_methods.h"

namespace zerocore {

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
