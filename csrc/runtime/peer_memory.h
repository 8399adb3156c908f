// The memory of the other ranks of a group, where all are processes of one machine.
//
// Note [Reads of peers]
// Gloo moves bytes through sockets, also within a machine. There a rank can copy the others' shards
// straight out of their memory, which takes less than half of the time, and rows go to their places
// at once. All ranks come in with the address of their shard, which tells that it has its values;
// all read; none goes on before all have read, so that it may change its shard then. That takes
// two small messages, and leaves no collective under way that a layer could overlap with. Units
// that are held, as by exports, are gathered like this; those of a step are not.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <functional>
#include <vector>

#include "io/process_memory.h"

namespace zerocore {

// The processes of a gloo group's ranks; empty on all ranks unless each can read every other one's
// memory, which they try with a random number. Collective. Throws what the group throws.
std::vector<int64_t> find_readable_processes(c10d::Backend& group);

// Pieces of a rank's part, and where they belong among those of all.
using PiecesOfRank = std::function<std::vector<io::ProcessBytes>(int64_t rank)>;

// Copies all ranks' pieces to `full`; `own` is this rank's part. Collective; blocks until no rank
// reads `own` any more. Throws std::system_error that names a rank which cannot be read, and what
// the group throws.
void read_processes(
    c10d::Backend& group,
    const std::vector<int64_t>& processes,
    const void* own,
    void* full,
    const PiecesOfRank& pieces_of);

} // namespace zerocore
