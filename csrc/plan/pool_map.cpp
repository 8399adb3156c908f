#include "plan/pool_map.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "common/math.h"

namespace zerocore {

namespace {

// The alignment of torch's CUDA allocator, and of blocks in the arena.
constexpr int64_t kBlockAlignment = 512;

using Neighbours = std::vector<std::vector<int>>;

Neighbours neighbours_of(const std::vector<HeldBlock>& blocks) {
  const auto num_blocks = static_cast<int>(blocks.size());
  Neighbours result(num_blocks);
  for (int a = 0; a < num_blocks; ++a) {
    for (int b = 0; b < a; ++b) {
      if (blocks[a].beside.contains(b) || blocks[b].beside.contains(a)) {
        result[a].push_back(b);
        result[b].push_back(a);
      }
    }
  }
  return result;
}

int64_t lowest_gap(std::vector<Range> taken, int64_t nbytes) {
  std::ranges::sort(taken, {}, &Range::begin);
  int64_t begin = 0;
  for (const Range& range : taken) {
    if (begin + nbytes <= range.begin) {
      break;
    }
    begin = std::max(begin, range.end);
  }
  return begin;
}

Arrangement place_in_order(
    const std::vector<int>& order,
    const std::vector<HeldBlock>& blocks,
    const Neighbours& neighbours) {
  Arrangement result{std::vector<Range>(blocks.size()), 0};
  for (const int index : order) {
    std::vector<Range> taken;
    for (const int other : neighbours[index]) {
      if (!result.places[other].empty()) {
        taken.push_back(result.places[other]);
      }
    }
    const int64_t begin = lowest_gap(std::move(taken), blocks[index].nbytes);
    result.places[index] = {begin, begin + blocks[index].nbytes};
    result.nbytes = std::max(result.nbytes, result.places[index].end);
  }
  return result;
}

// Places blocks greedily (Pisarchyk and Lee 2020, arXiv:2001.03288): each at the lowest offset at
// which it overlaps no block held at the same time. Tries the order of first use, and the order by
// the bytes of a block and its neighbours, largest first. Returns the smaller arrangement.
Arrangement arrange(std::vector<HeldBlock> blocks) {
  for (HeldBlock& block : blocks) {
    block.nbytes = round_up(block.nbytes, kBlockAlignment);
  }
  const Neighbours neighbours = neighbours_of(blocks);
  std::vector<int> order(blocks.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](int index) { return blocks[index].first_use; });
  Arrangement by_use = place_in_order(order, blocks, neighbours);
  std::vector<int64_t> breadths(blocks.size());
  for (const int index : order) {
    breadths[index] = blocks[index].nbytes;
    for (const int other : neighbours[index]) {
      breadths[index] += blocks[other].nbytes;
    }
  }
  std::ranges::stable_sort(order, std::greater(), [&](int index) { return breadths[index]; });
  Arrangement by_breadth = place_in_order(order, blocks, neighbours);
  return by_use.nbytes < by_breadth.nbytes ? by_use : by_breadth;
}

} // namespace

std::optional<int64_t> PoolMap::find_place(const BlockKey& key, int64_t nbytes, bool learn) const {
  const auto found = indices_.find(key);
  if (!learn || found == indices_.end()) {
    return std::nullopt;
  }
  const Range& place = blocks_[found->second].place;
  const bool taken = std::any_of(held_.begin(), held_.end(), [&](int other) {
    return blocks_[other].where == Where::Arena && !intersect(blocks_[other].place, place).empty();
  });
  return nbytes > place.size() || taken ? std::nullopt : std::optional(place.begin);
}

void PoolMap::acquire(
    const BlockKey& key,
    int64_t nbytes,
    const std::optional<int64_t>& place,
    bool learn) {
  const bool placed = place.has_value();
  Block& block = block_of(key);
  TORCH_INTERNAL_ASSERT(block.where == Where::Nowhere, "the block is held already");
  if (learn) {
    learn_from(static_cast<int>(&block - blocks_.data()), nbytes);
    missed_ = missed_ || !placed;
  }
  block.where = placed ? Where::Arena : Where::Own;
  block.held_nbytes = nbytes;
  if (!placed) {
    add_reserved(nbytes);
  } else if (!std::exchange(taken_, true)) {
    add_reserved(arena_nbytes_);
  }
  stats_.in_use_nbytes += nbytes;
  stats_.peak_nbytes = std::max(stats_.peak_nbytes, stats_.in_use_nbytes);
  stats_.recent_peak_nbytes = std::max(stats_.recent_peak_nbytes, stats_.in_use_nbytes);
}

void PoolMap::release(const BlockKey& key) {
  Block& block = block_of(key);
  const auto index = static_cast<int>(&block - blocks_.data());
  TORCH_INTERNAL_ASSERT(block.where != Where::Nowhere, "the released block is not held");
  stats_.in_use_nbytes -= block.held_nbytes;
  stats_.reserved_nbytes -= block.where == Where::Own ? block.held_nbytes : 0;
  block.where = Where::Nowhere;
  if (!held_set_.contains(index)) {
    return;
  }
  std::erase(held_, index);
  held_set_.remove(index);
  held_nbytes_ -= round_up(block.held_nbytes, kBlockAlignment);
  if (held_.empty()) {
    if (std::exchange(missed_, false)) {
      rearrange();
    }
    ++period_;
    recent_highest_nbytes_ = 0;
  }
}

PoolMap PoolMap::arranged() const {
  TORCH_INTERNAL_ASSERT(stats_.in_use_nbytes == 0);
  PoolMap result;
  result.indices_ = indices_;
  result.blocks_.resize(blocks_.size());
  result.highest_nbytes_ = highest_nbytes_;
  std::vector<HeldBlock> blocks = all_blocks();
  const Arrangement arrangement = arrange(blocks);
  result.adopt(std::move(blocks), arrangement);
  return result;
}

PoolMap::Block& PoolMap::block_of(const BlockKey& key) {
  const auto [found, added] = indices_.try_emplace(key, static_cast<int>(blocks_.size()));
  return added ? blocks_.emplace_back() : blocks_[found->second];
}

void PoolMap::learn_from(int index, int64_t nbytes) {
  Block& block = blocks_[index];
  if (std::exchange(block.period, period_) != period_) {
    block.recent = {0, num_acquired_, {}};
  }
  ++num_acquired_;
  block.recent.nbytes = std::max(block.recent.nbytes, nbytes);
  block.recent.beside.add_all(held_set_);
  held_.push_back(index);
  held_set_.add(index);
  held_nbytes_ += round_up(nbytes, kBlockAlignment);
  recent_highest_nbytes_ = std::max(recent_highest_nbytes_, held_nbytes_);
  highest_nbytes_ = std::max(highest_nbytes_, held_nbytes_);
}

void PoolMap::add_reserved(int64_t nbytes) {
  ++stats_.num_allocations;
  stats_.reserved_nbytes += nbytes;
  stats_.peak_reserved_nbytes = std::max(stats_.peak_reserved_nbytes, stats_.reserved_nbytes);
}

std::vector<HeldBlock> PoolMap::recent_blocks() const {
  std::vector<HeldBlock> result;
  for (const Block& block : blocks_) {
    result.push_back(block.period == period_ ? block.recent : HeldBlock());
  }
  return result;
}

std::vector<HeldBlock> PoolMap::all_blocks() const {
  std::vector<HeldBlock> result;
  for (const Block& block : blocks_) {
    HeldBlock& both = result.emplace_back(block.known);
    if (block.recent.nbytes > 0) {
      both.nbytes = std::max(both.nbytes, block.recent.nbytes);
      both.first_use = block.recent.first_use;
      both.beside.add_all(block.recent.beside);
    }
  }
  return result;
}

// Arranges all known blocks if the arena is at most a quarter larger than the most bytes held at a
// time. Otherwise arranges the blocks of this period alone, if that arena is smaller and the period
// was a large part of a step (an evaluation is not).
void PoolMap::rearrange() {
  std::vector<HeldBlock> blocks = all_blocks();
  Arrangement next = arrange(blocks);
  if (4 * next.nbytes > 5 * highest_nbytes_ && 4 * recent_highest_nbytes_ > 3 * highest_nbytes_) {
    std::vector<HeldBlock> recent = recent_blocks();
    Arrangement alone = arrange(recent);
    if (alone.nbytes < next.nbytes) {
      blocks = std::move(recent);
      next = std::move(alone);
      highest_nbytes_ = recent_highest_nbytes_;
    }
  }
  if (std::exchange(taken_, false)) {
    stats_.reserved_nbytes -= arena_nbytes_;
  }
  adopt(std::move(blocks), next);
  ++arrangement_;
}

void PoolMap::adopt(std::vector<HeldBlock> blocks, const Arrangement& arrangement) {
  for (size_t i = 0; i < blocks_.size(); ++i) {
    blocks_[i].known = std::move(blocks[i]);
    blocks_[i].recent = {}; // merged into `known`
    blocks_[i].place = arrangement.places[i];
  }
  arena_nbytes_ = arrangement.nbytes;
}

} // namespace zerocore
