// Greedy packing.
#include "plan/arrangement.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "common/math.h"

namespace zerocore {

namespace {

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

} // namespace

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

} // namespace zerocore
