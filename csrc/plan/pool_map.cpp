// Places of blocks in the arena.
#include "plan/pool_map.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/math.h"

namespace zerocore {

namespace {

// As the device's allocator aligns what it gives.
constexpr int64_t kAlignment = 512;

// An arrangement is refused if it takes more than 3/2 of what was held at a time.
constexpr int64_t kMostParts = 3;
constexpr int64_t kOfParts = 2;

int64_t place_nbytes(int64_t nbytes) {
  return round_up(nbytes, kAlignment);
}

int64_t lowest_gap(std::vector<Range> taken, int64_t nbytes) {
  std::sort(
      taken.begin(), taken.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  int64_t begin = 0;
  for (const Range& range : taken) {
    if (begin + nbytes <= range.begin) {
      break;
    }
    begin = std::max(begin, range.end);
  }
  return begin;
}

} // namespace

std::optional<int64_t> PoolMap::acquire(const BlockKey& key, int64_t nbytes, bool learn) {
  const int index = index_of(key);
  Block& block = blocks_[index];
  TORCH_INTERNAL_ASSERT(block.where == Where::Nowhere, "a block is acquired twice");
  const bool placed = learn && has_free_place(block, nbytes);
  if (learn) {
    learn_from(index, nbytes);
    missed_ = missed_ || !placed;
  }
  block.where = placed ? Where::Arena : Where::Own;
  block.held_nbytes = nbytes;
  if (!placed) {
    add_reserved(nbytes);
  } else if (!taken_) {
    taken_ = true;
    add_reserved(arena_nbytes_);
  }
  stats_.in_use_nbytes += nbytes;
  stats_.peak_nbytes = std::max(stats_.peak_nbytes, stats_.in_use_nbytes);
  stats_.recent_peak_nbytes = std::max(stats_.recent_peak_nbytes, stats_.in_use_nbytes);
  return placed ? std::optional(block.place.begin) : std::nullopt;
}

void PoolMap::release(const BlockKey& key) {
  const int index = index_of(key);
  Block& block = blocks_[index];
  TORCH_INTERNAL_ASSERT(block.where != Where::Nowhere, "a block is released that nobody holds");
  stats_.in_use_nbytes -= block.held_nbytes;
  stats_.reserved_nbytes -= block.where == Where::Own ? block.held_nbytes : 0;
  block.where = Where::Nowhere;
  if (std::erase(held_, index) > 0) {
    held_nbytes_ -= place_nbytes(block.held_nbytes);
  }
  if (held_.empty() && missed_) {
    missed_ = false;
    rearrange();
  }
}

void PoolMap::drop_arena() {
  if (std::exchange(taken_, false)) {
    stats_.reserved_nbytes -= arena_nbytes_;
  }
}

PoolMap PoolMap::arranged() const {
  PoolMap result;
  result.indices_ = indices_;
  result.blocks_ = blocks_;
  result.highest_nbytes_ = highest_nbytes_;
  result.adopt(best_arrangement());
  return result;
}

int PoolMap::index_of(const BlockKey& key) {
  const auto [found, added] = indices_.try_emplace(key, static_cast<int>(blocks_.size()));
  if (added) {
    blocks_.emplace_back();
  }
  return found->second;
}

bool PoolMap::has_free_place(const Block& block, int64_t nbytes) const {
  return nbytes <= block.place.size() && std::none_of(held_.begin(), held_.end(), [&](int other) {
           return blocks_[other].where == Where::Arena &&
               !intersect(blocks_[other].place, block.place).empty();
         });
}

void PoolMap::learn_from(int index, int64_t nbytes) {
  Block& block = blocks_[index];
  block.nbytes = std::max(block.nbytes, nbytes);
  for (const int other : held_) {
    block.beside.insert(other);
    blocks_[other].beside.insert(index);
  }
  held_.push_back(index);
  held_nbytes_ += place_nbytes(nbytes);
  highest_nbytes_ = std::max(highest_nbytes_, held_nbytes_);
}

void PoolMap::add_reserved(int64_t nbytes) {
  ++stats_.num_allocations;
  stats_.reserved_nbytes += nbytes;
  stats_.peak_reserved_nbytes = std::max(stats_.peak_reserved_nbytes, stats_.reserved_nbytes);
}

PoolMap::Arrangement PoolMap::arrange_by(const std::vector<int>& order) const {
  Arrangement result{std::vector<Range>(blocks_.size()), 0};
  for (const int index : order) {
    const Block& block = blocks_[index];
    std::vector<Range> taken;
    for (const int other : block.beside) {
      taken.push_back(result.places[other]); // empty as yet, or a place
    }
    const int64_t begin = lowest_gap(std::move(taken), place_nbytes(block.nbytes));
    result.places[index] = {begin, begin + place_nbytes(block.nbytes)};
    result.nbytes = std::max(result.nbytes, result.places[index].end);
  }
  return result;
}

PoolMap::Arrangement PoolMap::best_arrangement() const {
  std::vector<int> order(blocks_.size()); // as they were first acquired
  std::iota(order.begin(), order.end(), 0);
  Arrangement by_time = arrange_by(order);
  std::vector<int64_t> breadths;
  for (const Block& block : blocks_) {
    int64_t& breadth = breadths.emplace_back(place_nbytes(block.nbytes));
    for (const int other : block.beside) {
      breadth += place_nbytes(blocks_[other].nbytes);
    }
  }
  std::stable_sort(
      order.begin(), order.end(), [&](int a, int b) { return breadths[a] > breadths[b]; });
  Arrangement by_breadth = arrange_by(order);
  return by_time.nbytes < by_breadth.nbytes ? by_time : by_breadth;
}

void PoolMap::adopt(const Arrangement& arrangement) {
  for (size_t i = 0; i < blocks_.size(); ++i) {
    blocks_[i].place = arrangement.places[i];
  }
  arena_nbytes_ = arrangement.nbytes;
}

void PoolMap::rearrange() {
  if (highest_nbytes_ <= refused_nbytes_) {
    return; // more has been held beside more since, so it would be refused again
  }
  const Arrangement next = best_arrangement();
  if (next.nbytes * kOfParts > highest_nbytes_ * kMostParts) {
    refused_nbytes_ = highest_nbytes_;
    return;
  }
  drop_arena();
  adopt(next);
  ++arrangement_;
}

} // namespace zerocore
