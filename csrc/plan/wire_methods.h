// The methods of all-gathers and reductions on the wire, and the sums that each rank then computes;
// integers only.
//
// comm/collectives.cpp has a case for each method. The planner asks the same functions, without a
// process group.
#pragma once

#include <cstdint>
#include <string>

namespace zerocore {

struct GatherMethod {
  enum class Kind : uint8_t {
    AllGather, // the backend's all-gather
    Broadcasts, // each rank broadcasts its shard, in place
    Pieces, // two ranks broadcast pieces of their shards in turn
    Copies, // an all-to-all of copies of the rank's shard, which take as much memory as all shards
  };
  Kind kind = Kind::AllGather;
  int64_t copied_nbytes = 0; // the method is Copies if all shards have at most this many bytes

  Kind kind_of(int64_t nbytes) const {
    return nbytes <= copied_nbytes ? Kind::Copies : kind;
  }
};

struct ReduceMethod {
  enum class Kind : uint8_t {
    ReduceScatter, // the backend's reduce-scatter
    Exchange, // an all-to-all; each rank sums what it receives
    Pieces, // an exchange between two ranks, by broadcasts of pieces in turn
  };
  Kind kind = Kind::ReduceScatter;

  // Returns how many values per element the rank receives and must sum. A single value is the sum
  // already, and may lie in its final place.
  int64_t parts(int64_t num_ranks) const {
    return kind == Kind::ReduceScatter ? 1 : num_ranks;
  }
};

struct WireMethods {
  GatherMethod gather;
  ReduceMethod reduce;
  // Replaces an all-reduce: ranks exchange parts, sum them in the order of ranks, and gather the
  // sums.
  bool sums_in_parts = false;

  // Returns the methods that take the least processor time on a c10d backend with `num_ranks`
  // ranks, as benchmarks/wire_methods.py measures them for gloo with 2 to 24 ranks. Each broadcast
  // costs a turn of gloo's threads, and an all-reduce costs 2 (N - 1) turns one after the other.
  // From four ranks on, the one turn of an all-to-all costs less. With `sums_in_order`, ranks
  // exchange parts and sum them in the order of ranks, on any backend.
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

  // Sets the methods of two ranks on gloo with a network link between them, see Note [Pieces]. The
  // planner need not know, because the memory is the same.
  void send_pieces() {
    gather.kind = GatherMethod::Kind::Pieces;
    reduce.kind = ReduceMethod::Kind::Pieces;
  }
};

} // namespace zerocore
