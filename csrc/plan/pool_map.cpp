// Places of blocks in the arena.
#include "plan/pool_map.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "common/math.h"

namespace zerocore {

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
  TORCH_INTERNAL_ASSERT(block.where == Where::Nowhere, "a block is acquired twice");
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
  TORCH_INTERNAL_ASSERT(block.where != Where::Nowhere, "a block is released that nobody holds");
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

// Everything known is worth up to a quarter more than what is held at a time. Beyond that it is
// what this period did that counts, unless it was a small part of a step (an evaluation, say).
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
    blocks_[i].recent = {}; // is known now, or to be forgotten
    blocks_[i].place = arrangement.places[i];
  }
  arena_nbytes_ = arrangement.nbytes;
}

} // namespace zerocore
