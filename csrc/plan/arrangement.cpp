// Greedy packing.
#include "plan/arrangement.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/math.h"

namespace zerocore {

namespace {

using Neighbours = std::vector<std::vector<int>>;

Neighbours neighbours_of(const Blocks& blocks) {
  const auto num_blocks = static_cast<int>(blocks.nbytes.size());
  Neighbours result(num_blocks);
  for (int a = 0; a < num_blocks; ++a) {
    for (int b = 0; b < a; ++b) {
      if (blocks.beside[a].contains(b) || blocks.beside[b].contains(a)) {
        result[a].push_back(b);
        result[b].push_back(a);
      }
    }
  }
  return result;
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

Arrangement place_in_order(
    const std::vector<int>& order,
    const std::vector<int64_t>& nbytes,
    const Neighbours& neighbours) {
  Arrangement result{std::vector<Range>(nbytes.size()), 0};
  for (const int index : order) {
    std::vector<Range> taken;
    for (const int other : neighbours[index]) {
      if (!result.places[other].empty()) {
        taken.push_back(result.places[other]);
      }
    }
    const int64_t begin = lowest_gap(std::move(taken), nbytes[index]);
    result.places[index] = {begin, begin + nbytes[index]};
    result.nbytes = std::max(result.nbytes, begin + nbytes[index]);
  }
  return result;
}

} // namespace

Arrangement arrange(Blocks blocks) {
  for (int64_t& nbytes : blocks.nbytes) {
    nbytes = round_up(nbytes, kBlockAlignment);
  }
  const Neighbours neighbours = neighbours_of(blocks);
  std::vector<int> order(blocks.nbytes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return blocks.first_uses[a] < blocks.first_uses[b];
  });
  Arrangement by_use = place_in_order(order, blocks.nbytes, neighbours);
  std::vector<int64_t> breadths = blocks.nbytes;
  for (const int index : order) {
    for (const int other : neighbours[index]) {
      breadths[index] += blocks.nbytes[other];
    }
  }
  std::stable_sort(
      order.begin(), order.end(), [&](int a, int b) { return breadths[a] > breadths[b]; });
  Arrangement by_breadth = place_in_order(order, blocks.nbytes, neighbours);
  return by_use.nbytes < by_breadth.nbytes ? by_use : by_breadth;
}

} // namespace zerocore
