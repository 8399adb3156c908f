// How gathers and reductions go over the wire, and what they leave to be summed; integers only.
//
// Collectives issue them, and the planner asks the same functions without a process group. A method
// is a value of an enum and its figures here, and a case in comm/collectives.cpp.
#pragma once

#include <cstdint>
#include <string>

namespace zerocore {

// How every rank gets the shards of all.
struct GatherMethod {
  enum class Kind : uint8_t {
    AllGather, // the backend's own
    Broadcasts, // one of each rank's shard, in place
    Pieces, // the same of two ranks, by turns
    Copies, // an all-to-all of copies of the rank's shard, which take the room of all shards
  };
  Kind kind = Kind::AllGather;
  int64_t copied_nbytes = 0; // of all shards: up to here ranks send copies instead

  Kind kind_of(int64_t nbytes) const {
    return nbytes <= copied_nbytes ? Kind::Copies : kind;
  }
};

// How every rank gets its shard of a sum.
struct ReduceMethod {
  enum class Kind : uint8_t {
    ReduceScatter, // the backend's own
    Exchange, // an all-to-all: every rank sums what it received
    Pieces, // the same of two ranks by broadcasts in pieces, by turns
  };
  Kind kind = Kind::ReduceScatter;

  // Parts that it leaves for each element on each of `num_ranks` ranks, to be summed there. Where
  // it is one, that is the sum, and may lie in its place.
  int64_t parts(int64_t num_ranks) const {
    return kind == Kind::ReduceScatter ? 1 : num_ranks;
  }
};

struct WireMethods {
  GatherMethod gather;
  ReduceMethod reduce;
  // Instead of an all-reduce ranks exchange parts, add them in their order and gather the sums.
  bool sums_in_parts = false;

  // The ones that take least processor time on a c10d backend of that name with `num_ranks` ranks;
  // of gloo's, benchmarks/wire_methods.py measures 2 to 24. There a broadcast of each rank costs a
  // turn of gloo's threads, and an all-reduce 2 (N - 1) of them one after the other: with four
  // ranks or more the one turn of an all-to-all costs less. `sums_in_order`: ranks exchange parts
  // and add them in their order, on any backend.
  static WireMethods of_backend(const std::string& name, int64_t num_ranks, bool sums_in_order) {
    constexpr int64_t kCopiedNbytes = 256 * 1024;
    WireMethods methods;
    if (name == "gloo") {
      const bool has_many = num_ranks >= 4;
      methods.gather = {GatherMethod::Kind::Broadcasts, has_many ? kCopiedNbytes : 0};
      methods.reduce.kind = ReduceMethod::Kind::Exchange;
      methods.sums_in_parts = has_many;
    } else if (sums_in_order) {
      methods.reduce.kind = ReduceMethod::Kind::Exchange;
    }
    return methods;
  }

  // Of two ranks on gloo with a link between them, see Note [Pieces]. A plan needs not know: the
  // memory is the same.
  void send_pieces() {
    gather.kind = GatherMethod::Kind::Pieces;
    reduce.kind = ReduceMethod::Kind::Pieces;
  }
};

} // namespace zerocore
