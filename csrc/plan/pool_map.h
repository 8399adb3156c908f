// Where the blocks of the bucket pool lie in its arena; integers only.
#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "common/types.h"

namespace zerocore {

// A set of small numbers.
class BitSet {
 public:
  void add(int index) {
    words_.resize(std::max(words_.size(), word_of(index) + 1));
    words_[word_of(index)] |= bit_of(index);
  }
  void remove(int index) {
    if (word_of(index) < words_.size()) {
      words_[word_of(index)] &= ~bit_of(index);
    }
  }
  bool contains(int index) const {
    return word_of(index) < words_.size() && (words_[word_of(index)] & bit_of(index)) != 0;
  }
  void add_all(const BitSet& other) {
    words_.resize(std::max(words_.size(), other.words_.size()));
    for (size_t i = 0; i < other.words_.size(); ++i) {
      words_[i] |= other.words_[i];
    }
  }

 private:
  static size_t word_of(int index) {
    return static_cast<size_t>(index) / 64;
  }
  static uint64_t bit_of(int index) {
    return uint64_t{1} << (static_cast<unsigned>(index) % 64);
  }

  std::vector<uint64_t> words_;
};

// Note [Places in the arena]
// A block is what a unit takes from the pool for one purpose: its gathered parameters, a bucket of
// gradients. It lies at the same place in every step. Blocks may share bytes if they were never
// held at a time, so the map remembers which were. For a step of the Llamas that ship as presets
// the arena then needs no more than is held at a time.
//
// The first places come from the expected step, before anything is allocated. A step that does
// something else is served all the same: a block without a place, or whose place is taken, gets
// memory of its own until it is released. Once nothing is held (the end of a backward, mostly)
// all places are given anew, to suit what was done since the last such moment as well as what was
// known. Where both together pack badly, as with another order of calls, what was known is
// forgotten.
//
// The planner drives the same object as the runtime, so their bytes are equal.

struct BlockKey {
  UnitId unit = -1;
  Memory memory = Memory::Full;
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

// A block, which others name by its index. One of two blocks that were held at the same time has to
// name the other; a block of zero bytes is not there.
struct HeldBlock {
  int64_t nbytes = 0;
  int64_t first_use = 0; // grows with the time of it
  BitSet beside; // blocks that were held at the same time
};

// Places in which no two blocks overlap that were held at the same time.
struct Arrangement {
  std::vector<Range> places; // of each block, aligned; empty for a block of zero bytes
  int64_t nbytes = 0;
};

class PoolMap {
 public:
  // Offset at which a block is to be placed; none where it gets memory of its own. `learn` says
  // whether a step is expected to do the same again; if not, it stays out of the arena.
  std::optional<int64_t> find_place(const BlockKey& key, int64_t nbytes, bool learn = true) const;
  // `place`: what find_place() says.
  void acquire(
      const BlockKey& key,
      int64_t nbytes,
      const std::optional<int64_t>& place,
      bool learn = true);
  void release(const BlockKey& key);

  // The map of a pool that nothing was taken from, with a place for every block learned so far.
  // Nothing is held.
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
    HeldBlock known; // what its place suits, with the most bytes that were asked for
    HeldBlock recent; // the same, of the last period that it was acquired in
    int64_t period = -1; // that period
    Range place; // empty for none
    Where where = Where::Nowhere;
    int64_t held_nbytes = 0;
  };

  Block& block_of(const BlockKey& key);
  void learn_from(int index, int64_t nbytes);
  void add_reserved(int64_t nbytes);
  std::vector<HeldBlock> recent_blocks() const;
  std::vector<HeldBlock> all_blocks() const;
  void rearrange();
  void adopt(std::vector<HeldBlock> blocks, const Arrangement& arrangement);

  std::map<BlockKey, int> indices_;
  std::vector<Block> blocks_;
  std::vector<int> held_; // indices of blocks held that places are learned from
  BitSet held_set_; // the same
  int64_t held_nbytes_ = 0; // their sizes as they would be in the arena
  int64_t highest_nbytes_ = 0, recent_highest_nbytes_ = 0; // highest held_nbytes_
  int64_t num_acquired_ = 0;
  int64_t period_ = 0; // counts the moments at which nothing was held
  bool missed_ = false; // in this period a block had no place
  bool taken_ = false; // the arena was allocated
  int64_t arena_nbytes_ = 0;
  int64_t arrangement_ = 0;
  PoolStats stats_;
};

} // namespace zerocore
