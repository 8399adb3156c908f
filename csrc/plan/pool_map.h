// Where the blocks of the bucket pool lie in its arena; integers only.
//
// Note [Places in the arena]
// A block is the memory that a unit takes from the pool for one purpose: its full parameters, or a
// bucket of gradients. The block lies at the same place in every step. Two blocks may share bytes
// if they were never held at the same time, so the map records which blocks were held together. For
// a step of the Llama presets, the arena then needs no more bytes than the step holds at a time.
//
// The first places come from the expected step, before anything is allocated. An unexpected block,
// or a block whose place is taken, gets memory of its own until it is released. When no block is
// held any more, usually at the end of a backward, the map arranges all places again. It then uses
// all known blocks and the blocks held since the last such moment. If these pack badly together, as
// after a change of the order of calls, it uses the recent blocks only.
//
// The planner drives the same object as the runtime, so both count the same bytes.
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

// A set of small integers.
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

struct BlockKey {
  UnitId unit = -1;
  Memory memory = Memory::Full;
  int32_t region = 0;

  auto operator<=>(const BlockKey&) const = default;
};

struct PoolStats {
  int64_t in_use_nbytes = 0;
  int64_t peak_nbytes = 0; // highest in_use_nbytes so far
  int64_t recent_peak_nbytes = 0; // highest in_use_nbytes since forget_recent_peak()
  int64_t reserved_nbytes = 0; // from the device's allocator: the arena and blocks outside of it
  int64_t peak_reserved_nbytes = 0; // highest reserved_nbytes so far
  int64_t num_allocations = 0; // calls to the device's allocator
};

// A block that was held. Zero bytes: the block was not held.
struct HeldBlock {
  int64_t nbytes = 0;
  int64_t first_use = 0; // order among the first uses of blocks
  BitSet beside; // blocks held at the same time; at least one of each pair lists the other
};

// Places in which blocks held at the same time do not overlap.
struct Arrangement {
  std::vector<Range> places; // by block, aligned; empty for a block of zero bytes
  int64_t nbytes = 0;
};

// The places of all blocks of a pool, and the blocks that are held.
class PoolMap {
 public:
  // Returns the block's offset in the arena; nullopt if it gets memory of its own. With `learn`
  // later steps probably take the block again; without it the block stays out of the arena.
  std::optional<int64_t> find_place(const BlockKey& key, int64_t nbytes, bool learn = true) const;
  // Takes a block; `place` is the result of find_place().
  void acquire(
      const BlockKey& key,
      int64_t nbytes,
      const std::optional<int64_t>& place,
      bool learn = true);
  void release(const BlockKey& key);

  // Returns the map of a new pool, with a place for every block learned so far. No block may be
  // held.
  PoolMap arranged() const;

  int64_t arena_nbytes() const {
    return arena_nbytes_;
  }
  // Returns how often places were arranged again; each time the arena must be reallocated.
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
    HeldBlock known; // the uses that its place accounts for
    HeldBlock recent; // the uses in `period`
    int64_t period = -1; // the last period in which the block was acquired
    Range place; // empty if it has no place
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
  std::vector<int> held_; // indices of held blocks that were acquired with `learn`
  BitSet held_set_; // held_ as a set
  int64_t held_nbytes_ = 0; // sum of the held sizes, aligned as in the arena
  int64_t highest_nbytes_ = 0, recent_highest_nbytes_ = 0; // highest held_nbytes_
  int64_t num_acquired_ = 0;
  int64_t period_ = 0; // how often held_ became empty
  bool missed_ = false; // a block had no place in this period
  bool taken_ = false; // the arena was allocated
  int64_t arena_nbytes_ = 0;
  int64_t arrangement_ = 0;
  PoolStats stats_;
};

} // namespace zerocore
