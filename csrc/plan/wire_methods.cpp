// How gathers and reductions go over the wire.
#include "plan/wire_methods.h"

#include <c10/util/Exception.h>

namespace zerocore {

int64_t GatherMethod::wire_nbytes(int64_t nbytes) const {
  switch (kind) {
    case Kind::AllGather:
    case Kind::Broadcasts:
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

WireMethods WireMethods::of_backend(const std::string& name, bool sums_in_order) {
  WireMethods methods;
  if (name == "gloo") {
    methods = {{GatherMethod::Kind::Broadcasts}, {ReduceMethod::Kind::Exchange}};
  }
  if (sums_in_order) {
    methods.reduce.kind = ReduceMethod::Kind::Exchange;
  }
  return methods;
}

} // namespace zerocore
