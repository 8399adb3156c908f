// Where the blocks of the bucket pool lie in its arena; integers only.
//
// Note [Places in the arena]
// A block is what a unit takes from the pool for one purpose: its gathered parameters, a bucket of
// gradients. It lies at the same place in every step. Blocks may share bytes if they were never
// held at a time, so the map remembers which were. Places are given greedily (Pisarchyk and Lee
// 2020, arXiv:2001.03288): one block after the other, each at the lowest offset that is free of
// those it was held beside; once in the order of first use and once with the most bytes in and
// beside a block first, of which the better is taken. A step of the models that ship as presets
// then needs no more than is held at a time.
//
// The first places come from the expected step, before anything is allocated. A step that does
// something else is served all the same: a block without a place, or whose place is taken, gets
// memory of its own until it is released, and once nothing is held all places are given anew with
// what was learned. Where the blocks then share too little (another order in every step), the
// places stay as they are.
//
// The planner drives the same object as the runtime, so their bytes are equal.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "common/types.h"

namespace zerocore {

enum class BlockUse : uint8_t { Parameters, Gradients, Wire, Scratch };

struct BlockKey {
  UnitId unit = -1;
  BlockUse use = BlockUse::Parameters;
  int32_t region = 0;

  auto operator<=>(const BlockKey&) const = default;
};

struct PoolStats {
  int64_t in_use_nbytes = 0;
  int64_t peak_nbytes = 0; // highest in_use_nbytes so far
  int64_t recent_peak_nbytes = 0; // the same since forget_recent_peak()
  int64_t reserved_nbytes = 0; // taken from the device's allocator: arena and blocks beside it
  int64_t peak_reserved_nbytes = 0; // highest reserved_nbytes so far
  int64_t num_allocations = 0; // calls to the device's allocator
};

class PoolMap {
 public:
  // Offset of the block's place in the arena; none where it gets memory of its own. `learn` says
  // whether a step is expected to do the same again.
  std::optional<int64_t> acquire(const BlockKey& key, int64_t nbytes, bool learn = true);
  void release(const BlockKey& key);

  // The arena was not allocated, or was freed.
  void drop_arena();

  // The map of a pool that nothing was taken from, with a place for every block learned so far.
  PoolMap arranged() const;

  int64_t arena_nbytes() const {
    return arena_nbytes_;
  }
  // How often places were given anew; the arena is another one each time.
  int64_t arrangement() const {
    return arrangement_;
  }
  void forget_recent_peak() {
    stats_.recent_peak_nbytes = stats_.in_use_nbytes;
  }
  const PoolStats& stats() const {
    return stats_;
  }

 private:
  enum class Where : uint8_t { Nowhere, Arena, Own };
  struct Block {
    int64_t nbytes = 0; // most that was asked for
    std::set<int> beside; // blocks that were held at the same time
    Range place; // empty for none
    Where where = Where::Nowhere;
    int64_t held_nbytes = 0;
  };
  struct Arrangement {
    std::vector<Range> places; // of each block
    int64_t nbytes = 0;
  };

  int index_of(const BlockKey& key);
  bool has_free_place(const Block& block, int64_t nbytes) const;
  void learn_from(int index, int64_t nbytes);
  void add_reserved(int64_t nbytes);
  Arrangement arrange_by(const std::vector<int>& order) const;
  Arrangement best_arrangement() const;
  void adopt(const Arrangement& arrangement);
  void rearrange();

  std::map<BlockKey, int> indices_;
  std::vector<Block> blocks_;
  std::vector<int> held_; // indices of blocks held that places are learned from
  int64_t held_nbytes_ = 0; // their sizes as they would be in the arena
  int64_t highest_nbytes_ = 0; // highest held_nbytes_
  int64_t refused_nbytes_ = 0; // highest_nbytes_ when an arrangement was refused
  bool missed_ = false; // a block had no place since they were last given
  bool taken_ = false; // the arena was allocated
  int64_t arena_nbytes_ = 0;
  int64_t arrangement_ = 0;
  PoolStats stats_;
};

} // namespace zerocore
